// Literals of Python, as str() writes values and ast.literal_eval() reads them.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

namespace ferry::rollout::text {

// None, True, False, numbers, strings, lists, tuples and dictionaries whose keys are strings. A
// tuple becomes a list. A discarded value if the text is anything else, nests deeper than
// kDeepestJson, or is longer than 16 KiB.
nlohmann::ordered_json parse_python_literal(std::string_view text);

}  // namespace ferry::rollout::text
