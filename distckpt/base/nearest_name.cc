#include "distckpt/base/nearest_name.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace ferry {

std::size_t edit_distance(std::string_view left, std::string_view right) {
  std::vector<std::size_t> row(right.size() + 1);  // of the prefixes of `right`
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < left.size(); ++i) {
    auto diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < right.size(); ++j) {
      const auto replaced = diagonal + (left[i] == right[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

std::optional<std::string> nearest(std::string_view text,
                                   const std::vector<std::string>& candidates) {
  std::optional<std::string> best;
  auto best_distance = std::max<std::size_t>(2, text.size() / 3) + 1;
  for (const auto& candidate : candidates) {
    const auto distance = edit_distance(text, candidate);
    if (distance >= best_distance) continue;
    best = candidate;
    best_distance = distance;
  }
  return best;
}

}  // namespace ferry
