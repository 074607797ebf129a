#include "serve/api/served_model.h"

#include <array>

#include "serve/api/api_error.h"

namespace ferry::serve {

const rollout::text::Tokenizer& ServedModel::require_tokenizer(const std::string& param) const {
  if (tokenizer == nullptr)
    throw ApiError(400, "the model has no tokenizer: prompts are token ids", param);
  return *tokenizer;
}

const std::string& TokenTexts::of(std::int64_t id) {
  const auto [found, is_new] = texts_.try_emplace(id);
  if (!is_new) return found->second;
  if (tokenizer_ == nullptr) {
    found->second = "token_id:" + std::to_string(id);
  } else {
    const std::array ids{static_cast<rollout::text::TokenId>(id)};
    found->second = tokenizer_->decode(ids, {.skip_special_tokens = false});
  }
  return found->second;
}

}  // namespace ferry::serve
