// Values that families write in other ways than JSON: literals of Python, as str() writes values
// and ast.literal_eval() reads them, and Gemma's, with keys that have no quotes.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ferry::rollout::text {

// None, True, False, numbers, strings, lists, tuples and dictionaries whose keys are strings. A
// tuple becomes a list. A discarded value if the text is anything else, nests deeper than
// kDeepestJson, or is longer than 16 KiB.
nlohmann::ordered_json parse_python_literal(std::string_view text);

struct PythonCall {
  std::string name{};  // perhaps with dots
  nlohmann::ordered_json arguments = nlohmann::ordered_json::object();
};
// Calls whose arguments are literals with names, f(a=1, b='x'), with commas or white space between
// them. JSON's null, true and false are literals, too. Nothing if the text is anything else, or has
// no call.
std::optional<std::vector<PythonCall>> parse_python_calls(std::string_view text);

// {key:value,...} with `quote` around strings. Values are strings, objects, lists in brackets,
// numbers, true, false and null; anything else without quotes is a string. A discarded value if the
// text is no object, or nests deeper than kDeepestJson.
nlohmann::ordered_json parse_gemma_object(std::string_view text, std::string_view quote);

}  // namespace ferry::rollout::text
