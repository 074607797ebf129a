// The format of a constrained answer as JSON, in the terms of xgrammar's structural tags, and its
// grammar:
//
//   {"type": "const_string", "value": text}        the text; added tokens in it are these tokens
//   {"type": "regex", "pattern": text}             all of it matches (regex_expression.h)
//   {"type": "json_schema", "json_schema": schema} JSON by the schema (json_schema.h)
//   {"type": "any_text", "exclude": text}          any text without this one in it
//   {"type": "sequence", "elements": [...]}        one after the other
//   {"type": "or", "elements": [...]}              one of them
//   {"type": "optional", "content": format}
//   {"type": "star", "content": format}            any number of them
//
// A json_schema may have "at", the JSON pointer of the part of the schema that counts.
#pragma once

#include <string_view>

#include "rollout/grammar/expression.h"
#include "rollout/text/tokenizer/tokenizer.h"

namespace ferry::rollout::grammar {

// Throws Error(kUsage) that names what is not supported.
Rules read_format(std::string_view json, const text::Tokenizer& tokenizer);

}  // namespace ferry::rollout::grammar
