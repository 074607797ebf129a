// The names of an enumeration's values in files and settings: one table reads and prints them.
//   inline constexpr auto kSides = std::to_array<Named<Side>>({{"left", Side::kLeft}, ...});
#pragma once

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ferry {

template <typename T>
struct Named {
  std::string_view name{};
  T value{};
};

// Every value stands in its table.
template <typename T, std::size_t kCount>
constexpr std::string_view name_in(const std::array<Named<T>, kCount>& table, const T& value) {
  return std::ranges::find(table, value, &Named<T>::value)->name;
}

// Nothing for a name that is not in the table.
template <typename T, std::size_t kCount>
constexpr std::optional<T> find_in(const std::array<Named<T>, kCount>& table,
                                   std::string_view name) {
  const auto found = std::ranges::find(table, name, &Named<T>::name);
  return found == table.end() ? std::nullopt : std::optional<T>(found->value);
}

// In the table's order.
template <typename T, std::size_t kCount>
std::vector<std::string> names_of(const std::array<Named<T>, kCount>& table) {
  std::vector<std::string> names;
  for (const auto& one : table) names.emplace_back(one.name);
  return names;
}

// "left, middle, right", in the table's order.
template <typename T, std::size_t kCount>
std::string names_in(const std::array<Named<T>, kCount>& table) {
  return fmt::format("{}", fmt::join(names_of(table), ", "));
}

}  // namespace ferry
