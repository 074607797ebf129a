// The tokenizer of Moonshot's models (Moonlight, Kimi), which have a tiktoken.model in place of a
// tokenizer.json: a token in base64 and its rank on each line. tokenizer_config.json names the
// special tokens; the pattern by which texts are cut stands in the models' own code
// (tokenization_kimi.py, tokenization_moonshot.py), and here.
#pragma once

#include <optional>

#include "rollout/text/tokenizer/model_files.h"
#include "rollout/text/tokenizer/tokenizer_file.h"

namespace ferry::rollout::text {

inline constexpr const char* kTiktokenModel = "tiktoken.model";

// The same tokenizer as a tokenizer.json says it. Nothing if there is no tiktoken.model. Throws
// Error(kCorrupt) that names the line or the rank, Error(kUsage) for a tokenizer of another class
// or pattern, Error(kNotFound) without a tokenizer_config.json.
std::optional<TokenizerFile> read_tiktoken_file(const ModelFiles& files);

}  // namespace ferry::rollout::text
