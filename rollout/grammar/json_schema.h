// The texts that a JSON schema describes, as an expression. Each of them is valid by the schema;
// not each valid text is one of them:
//   - members come in the order of `properties`, and an object that lists some has no others unless
//     additionalProperties says so;
//   - names of others and strings with a pattern have no escapes that need not be;
//   - numbers and white space have bounds (json_text.h);
//   - one of enum and const is written in one way.
// Keywords that are neither annotations nor listed in docs/serving/structured_outputs.md are
// refused.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "rollout/grammar/expression.h"

namespace ferry::rollout::grammar {

// `at`: the JSON pointer of the part of the schema that counts; "" is all of it. Throws
// Error(kUsage) that names the keyword and its place.
ExpressionPtr json_schema(const nlohmann::ordered_json& schema,
                          const std::string& at,
                          Rules& rules);

}  // namespace ferry::rollout::grammar
