// Alternatives of an algorithm under the names that verl's configuration has for them.
#pragma once

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>
#include <vector>

#include "distckpt/base/error.h"

namespace ferry::trainer {

template <typename T>
struct Named {
  std::string_view name{};
  T value{};
};

// Throws Error(kUsage) "loss_agg_mode: mean is none of token-mean, ...".
template <typename T, std::size_t N>
T find_named(std::string_view subject,
             std::string_view name,
             const std::array<Named<T>, N>& choices) {
  const auto found = std::ranges::find(choices, name, &Named<T>::name);
  if (found != choices.end()) return found->value;
  std::vector<std::string_view> names;
  for (const auto& choice : choices) names.push_back(choice.name);
  fail(ErrorKind::kUsage, "{}: {} is none of {}", subject, name, fmt::join(names, ", "));
}

}  // namespace ferry::trainer
