// Guesses at what was meant by a name that is not known.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ferry {

// Insertions, removals and replacements of single characters from one to the other.
std::size_t edit_distance(std::string_view left, std::string_view right);

// The one of these that takes the fewest edits to become `text`; nothing if all are far away.
std::optional<std::string> nearest(std::string_view text,
                                   const std::vector<std::string>& candidates);

}  // namespace ferry
