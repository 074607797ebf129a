// Elements taken apart into planes, and put together again: plane p holds byte p of every element,
// so that the last plane has the signs and exponents of little-endian floats.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace ferry::distckpt {

// `planes` is as long as `elements`: plane after plane. Element sizes are 1, 2, 4 and 8 bytes, of
// which the spans hold whole multiples.
void split_planes(std::span<const std::byte> elements,
                  std::int64_t element_size,
                  std::span<std::byte> planes,
                  std::vector<std::byte>& scratch);

// The inverse. Plane p begins at planes[p]; all have elements.size() / planes.size() bytes.
void join_planes(std::span<const std::byte* const> planes,
                 std::span<std::byte> elements,
                 std::vector<std::byte>& scratch);

}  // namespace ferry::distckpt
