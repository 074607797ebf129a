// The tokens that end an answer, according to the files of a model.
#pragma once

#include <cstdint>
#include <vector>

#include "rollout/text/tokenizer/model_files.h"
#include "rollout/text/tokenizer/tokenizer.h"

namespace ferry::rollout::text {

// The eos_token_id (one or a list) of generation_config.json, or else of config.json, and that of
// the tokenizer, which may be null. Ascending, each once.
std::vector<std::int64_t> eos_token_ids(const ModelFiles& files, const Tokenizer* tokenizer);

}  // namespace ferry::rollout::text
