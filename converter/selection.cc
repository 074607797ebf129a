#include "converter/selection.h"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>

#include "distckpt/error.h"

namespace ferry::converter {

bool matches(std::string_view pattern, std::string_view name) {
  return pattern.empty() ||
         fnmatch(std::string(pattern).c_str(), std::string(name).c_str(), 0) == 0;
}

bool Selection::selects(std::string_view name) const {
  const auto matched = [&](const std::string& pattern) { return matches(pattern, name); };
  return (include.empty() || std::ranges::any_of(include, matched)) &&
         std::ranges::none_of(exclude, matched);
}

bool Selection::selects(const distckpt::ModelTensor& tensor) const {
  const std::string_view name = tensor.name;
  const bool padding = tensor.role == distckpt::Role::kPadding;
  return selects(padding ? name.substr(0, name.find(' ')) : name);
}

void Selection::require_matches(const std::vector<std::string_view>& names) const {
  const auto look = [&](std::string_view flag, const std::vector<std::string>& patterns) {
    for (const auto& pattern : patterns) {
      const auto matched = [&](std::string_view name) { return matches(pattern, name); };
      if (std::ranges::any_of(names, matched)) continue;
      throw Error(ErrorKind::kUsage, fmt::format("{} '{}': matches no tensor", flag, pattern),
                  names.empty() ? "" : fmt::format("a name is {}", names.front()));
    }
  };
  look("--include", include);
  look("--exclude", exclude);
}

std::string Selection::describe() const {
  std::string text;
  const auto add = [&](std::string_view flag, const std::vector<std::string>& patterns) {
    for (const auto& pattern : patterns) {
      text += fmt::format("{}{} '{}'", text.empty() ? "" : " ", flag, pattern);
    }
  };
  add("--include", include);
  add("--exclude", exclude);
  return text;
}

}  // namespace ferry::converter
