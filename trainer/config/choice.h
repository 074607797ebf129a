// A setting that is one of a few has a type whose values are listed once, under the names that verl
// or Megatron-Core has for them:
//   enum class ResumeMode : std::uint8_t { kAuto, kDisable };
//   template <>
//   inline constexpr auto kChoices<ResumeMode> = std::to_array<Named<ResumeMode>>(
//       {{"auto", ResumeMode::kAuto}, {"disable", ResumeMode::kDisable}});
// The configuration reads, prints and documents it by that list.
#pragma once

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/base/error.h"

namespace ferry::trainer {

template <typename T>
struct Named {
  std::string_view name{};
  T value{};
};

// Specialised for each such type; the documentation keeps the order.
template <typename T>
inline constexpr int kChoices = 0;

template <typename T>
concept Choice = requires {
  kChoices<T>.size();
};

template <Choice T>
std::vector<std::string> choice_names() {
  std::vector<std::string> names;
  for (const auto& choice : kChoices<T>) names.emplace_back(choice.name);
  return names;
}

template <Choice T>
std::string name_of(const T& value) {
  return std::string(std::ranges::find(kChoices<T>, value, &Named<T>::value)->name);
}

// Throws Error(kUsage) "loss_agg_mode: mean is none of token-mean, ...".
template <Choice T>
T parse_choice(std::string_view subject, std::string_view name) {
  const auto found = std::ranges::find(kChoices<T>, name, &Named<T>::name);
  require(found != kChoices<T>.end(), ErrorKind::kUsage, "{}: {} is none of {}", subject, name,
          fmt::join(choice_names<T>(), ", "));
  return found->value;
}

}  // namespace ferry::trainer
