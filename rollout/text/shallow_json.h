// JSON from outside. Values that nest deeply would exhaust the stack of whatever walks them.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

namespace ferry::rollout::text {

// Objects and lists within each other, at most.
inline constexpr int kDeepestJson = 100;

// True if so many brackets are open at once somewhere. The text need not be JSON.
bool nests_deeply(std::string_view json);

// A discarded value if the text is no JSON or nests deeply, or is long and has a key twice.
nlohmann::ordered_json parse_shallow_json(std::string_view json);

}  // namespace ferry::rollout::text
