// The post-processor of a tokenizer.json: the special tokens around a text.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "rollout/text/tokenizer/tokenizer_file.h"

namespace ferry::rollout::text {

struct PostProcessor {
  std::vector<TokenId> before{};
  std::vector<TokenId> behind{};
};

// `settings` may be null. Throws Error that names an unsupported type.
PostProcessor read_post_processor(const nlohmann::json& settings, const std::string& where);

}  // namespace ferry::rollout::text
