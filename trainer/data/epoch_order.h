// The order in which an epoch visits the records of all files. Shuffled, the chunks are permuted,
// runs of them that fit in the shuffle buffer become windows, and the records of a window are
// permuted: one window in memory is enough, whatever the size of the files. Data that fit in one
// window are shuffled as a whole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "trainer/data/permutation.h"
#include "trainer/data/record_file.h"

namespace ferry::trainer {

struct OrderOptions {
  bool shuffle = true;
  std::uint64_t seed = 0;
  std::int64_t shuffle_buffer_bytes = std::int64_t{256}
                                      << 20;  // a chunk that is larger is a window
  bool operator==(const OrderOptions&) const = default;
};

class EpochOrder {
 public:
  struct Place {
    std::size_t window = 0;
    std::size_t chunk = 0;  // index into `chunks`
    std::int64_t row = 0;   // of the chunk
  };

  EpochOrder(std::span<const ChunkSize> chunks, const OrderOptions& options, std::int64_t epoch);

  std::int64_t size() const { return begins_.back(); }

  // Requires 0 <= position < size().
  Place at(std::int64_t position) const;

 private:
  struct Window {
    std::int64_t begin = 0;  // its first position
    Permutation order;       // of its positions
  };

  std::vector<std::size_t> chunks_;   // as this epoch visits them
  std::vector<std::int64_t> begins_;  // the position of each one's first record, and the end
  std::vector<Window> windows_;       // shuffled only
};

}  // namespace ferry::trainer
