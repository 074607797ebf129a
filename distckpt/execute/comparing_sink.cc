#include "distckpt/execute/comparing_sink.h"

#include <algorithm>
#include <cstddef>

#include "distckpt/base/error.h"

namespace ferry::distckpt {

void ComparingSink::write(const Region& region,
                          std::span<const std::byte> packed,
                          std::vector<ChecksumPart>& /*parts*/) {
  std::vector<std::byte> found(packed.size());
  std::vector<ChecksumPart> of_found;
  there_.read(region, found, of_found);
  require(std::ranges::equal(found, packed), ErrorKind::kCorrupt,
          "{}: other bytes than were written", describe(layout_.storages()[region.at.storage]));
}

}  // namespace ferry::distckpt
