// Loops of a merge.
#pragma once

#include <cstdint>
#include <span>

namespace ferry::converter {

// Adds scaling * (left right) to a part of one row: row[i] += scaling * sum over k of left[k] *
// right[k, first + i], the sum in the order of k. `product` is scratch memory of the row's size.
void add_low_rank(std::span<const float> left,   // [rank]
                  std::span<const float> right,  // [rank, columns]
                  std::int64_t columns,
                  std::int64_t first,
                  float scaling,
                  std::span<float> product,
                  std::span<float> row);

}  // namespace ferry::converter
