// The codec of a delta's chunks: a stretch of a tensor's elements as what it differs by from the
// same stretch of another one. Elements are subtracted as unsigned numbers, modulo their width, so
// that every bit comes back, NaN and -0 too. docs/formats/delta.md gives the bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/execute/plane_codec.h"

namespace ferry::converter {

struct Difference {
  std::vector<std::byte> encoded{};
  std::int64_t num_changed = 0;  // elements
};

// Holds scratch memory: one for each thread, or one at a time.
class DifferenceCodec {
 public:
  // Both spans hold elements of 1, 2, 4 or 8 bytes. `name` says which stretch of which tensor it
  // is: the checksum covers it. The same bytes give the same encoded bytes.
  Difference encode(std::span<const std::byte> old,
                    std::span<const std::byte> now,
                    std::int64_t element_size,
                    std::string_view name);

  // Makes the new elements of the old ones, in place; how many change. Throws Error(kCorrupt)
  // saying what is wrong; the caller says where. Elements may be changed even then.
  std::int64_t apply(std::span<const std::byte> encoded,
                     std::int64_t element_size,
                     std::string_view name,
                     std::span<std::byte> elements);

 private:
  distckpt::PlaneCodec planes_;
  std::vector<std::byte> gaps_;
  std::vector<std::byte> numbers_;
};

// The indices of the elements that differ, in order.
std::vector<std::int64_t> changed_elements(std::span<const std::byte> old,
                                           std::span<const std::byte> now,
                                           std::int64_t element_size);

// The name of a chunk, for its checksum: "model.norm.weight[0]".
std::string chunk_name(std::string_view tensor, std::size_t chunk);

}  // namespace ferry::converter
