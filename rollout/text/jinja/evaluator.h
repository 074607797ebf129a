// Runs a chat template by a walk over its tree. Steps, depth and memory are bounded, so that no
// template can block the machine or fill its memory.
#pragma once

#include <string>

#include "rollout/text/jinja/syntax.h"
#include "rollout/text/jinja/value.h"

namespace ferry::rollout::text::jinja {

// `variables` are what the template sees. Throws Error(kUsage) "line N: ...".
std::string render(const Node& root, const Dict& variables);

// Throws Error(kUsage) that names a filter or test of the template that is not supported.
void require_known_names(const Node& root);

}  // namespace ferry::rollout::text::jinja
