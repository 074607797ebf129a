// A setting that is one of a few has a type whose values are listed once, under the names that verl
// or Megatron-Core has for them:
//   enum class ResumeMode : std::uint8_t { kAuto, kDisable };
//   template <>
//   inline constexpr auto kChoices<ResumeMode> = std::to_array<Named<ResumeMode>>(
//       {{"auto", ResumeMode::kAuto}, {"disable", ResumeMode::kDisable}});
// The configuration reads, prints and documents it by that list.
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "distckpt/base/error.h"
#include "distckpt/base/named.h"

namespace ferry::trainer {

// Specialised for each such type; the documentation keeps the order.
template <typename T>
inline constexpr int kChoices = 0;

template <typename T>
concept Choice = requires {
  kChoices<T>.size();
};

template <Choice T>
std::string name_of(const T& value) {
  return std::string(name_in(kChoices<T>, value));
}

// Throws Error(kUsage) "loss_agg_mode: mean is none of token-mean, ...".
template <Choice T>
T parse_choice(std::string_view subject, std::string_view name) {
  const auto found = find_in(kChoices<T>, name);
  require(found.has_value(), ErrorKind::kUsage, "{}: {} is none of {}", subject, name,
          names_in(kChoices<T>));
  return *found;
}

}  // namespace ferry::trainer
