// JSON from outside. Values that nest deeply would exhaust the stack of whatever walks them.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace ferry::rollout::text {

// Objects and lists within each other, at most.
inline constexpr int kDeepestJson = 100;

// True if so many brackets are open at once somewhere. The text need not be JSON.
bool nests_deeply(std::string_view json);

// A discarded value if the text is no JSON or nests deeply, or is long and has a key twice.
// Integers of more than 64 bits become floating-point numbers.
nlohmann::ordered_json parse_shallow_json(std::string_view json);

// An integer of more than 64 bits, for which nlohmann has no type: a binary value, its digits.
nlohmann::ordered_json wide_integer(std::string_view digits);
bool is_wide_integer(const nlohmann::ordered_json& value);

// The place of such an integer: the keys and positions of what it lies in, outermost first.
struct WideIntegerPlace {
  std::vector<std::string> path{};
  std::string digits{};
};
// Calls `visit` for each one of a JSON text until it returns false. The text need not be JSON.
void visit_wide_integers(std::string_view json,
                         const std::function<bool(const WideIntegerPlace& place)>& visit);

// Puts wide_integer()s into the value of a JSON text, into those `members` of it alone if any are
// named.
void keep_wide_integers(std::string_view json,
                        nlohmann::ordered_json& value,
                        const std::vector<std::string>& members = {});

// The same as parse_shallow_json, but each of them is a wide_integer().
nlohmann::ordered_json parse_exact_json(std::string_view json);

// A value on one line, with the digits of wide integers. Bytes that are not UTF-8 become U+FFFD.
std::string json_text(const nlohmann::ordered_json& value);

}  // namespace ferry::rollout::text
