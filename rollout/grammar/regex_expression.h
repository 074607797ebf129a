// Regular expressions as parts of a grammar, in ECMAScript's meaning: \d, \w and \s are ASCII.
// Look-ahead, atomic groups and possessive quantifiers are refused, and anchors inside the pattern.
#pragma once

#include <string_view>

#include "rollout/grammar/expression.h"

namespace ferry::rollout::grammar {

// All of a text matches. Throws Error(kUsage) that names what is not supported.
ExpressionPtr regex_expression(std::string_view pattern);
// The inside of a JSON string that has a match anywhere (all of it with ^ and $).
ExpressionPtr regex_in_json_string(std::string_view pattern);
// One character of a set in a JSON string: written as it is, or (" \ and control characters) in the
// only way or the shortest one that there is.
ExpressionPtr json_character(const text::CodePointSet& set);

}  // namespace ferry::rollout::grammar
