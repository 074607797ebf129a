#include "converter/adapter/loops/low_rank.h"

#include <algorithm>
#include <cstddef>

namespace ferry::converter {

void add_low_rank(std::span<const float> left,
                  std::span<const float> right,
                  std::int64_t columns,
                  std::int64_t first,
                  float scaling,
                  std::span<float> product,
                  std::span<float> row) {
  std::ranges::fill(product, 0.0F);
  const auto size = row.size();
  for (std::size_t k = 0; k < left.size(); ++k) {
    const float factor = left[k];
    const float* const from = right.data() + static_cast<std::ptrdiff_t>(k) * columns + first;
    float* const into = product.data();
    for (std::size_t i = 0; i < size; ++i) into[i] += factor * from[i];
  }
  for (std::size_t i = 0; i < size; ++i) row[i] += scaling * product[i];
}

}  // namespace ferry::converter
