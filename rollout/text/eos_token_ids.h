// The tokens that end an answer, as the files beside a model say.
#pragma once

#include <cstdint>
#include <vector>

#include "rollout/text/tokenizer/model_files.h"
#include "rollout/text/tokenizer/tokenizer.h"

namespace ferry::rollout::text {

// generation_config.json's or else config.json's eos_token_id, one or a list, and that of the
// tokenizer, which may be null. Ascending.
std::vector<std::int64_t> eos_token_ids(const ModelFiles& files, const Tokenizer* tokenizer);

}  // namespace ferry::rollout::text
