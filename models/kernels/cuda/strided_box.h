// A box that a kernel copies between two memories, and how many bytes of it a thread block takes.
#pragma once

#include <cstdint>

namespace ferry::models {

inline constexpr std::int64_t kStridedTileBytes = 32 << 10;

// An element of a table on the device. Strides, offsets and sizes are in bytes but for `inner`.
struct StridedBox {
  std::int64_t first_tile = 0;  // among those of the table
  std::int64_t from_offset = 0;
  std::int64_t to_offset = 0;
  std::int64_t from_strides[2] = {0, 0};  // of the outer dimension, and of the inner one
  std::int64_t to_strides[2] = {0, 0};
  std::int32_t from = -1;  // number of its memory, -1: the staging memory
  std::int32_t to = -1;
  std::uint32_t run = 0;    // consecutive on both sides
  std::uint32_t inner = 1;  // runs of the inner dimension
  std::uint32_t bytes = 0;  // all of it
};

}  // namespace ferry::models
