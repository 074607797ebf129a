#include "serve/api/served_model.h"

#include <array>
#include <string_view>

#include "serve/api/api_error.h"

namespace ferry::serve {

const rollout::text::Tokenizer& ServedModel::require_tokenizer(const std::string& param) const {
  if (tokenizer == nullptr)
    throw ApiError(400, "the model has no tokenizer: prompts are token ids", param);
  return *tokenizer;
}

std::vector<std::int64_t> ServedModel::encode(const std::string& text,
                                              bool special,
                                              const std::string& param,
                                              bool is_prompt) const {
  rollout::text::EncodeOptions options{.add_special_tokens = special};
  if (is_prompt) options.max_tokens = static_cast<std::size_t>(max_model_len);
  const auto ids = require_tokenizer(param).encode(text, options);
  return {ids.begin(), ids.end()};
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

const std::string& TokenTexts::bytes_of(std::int64_t id) {
  constexpr std::string_view kReplacement = "\xEF\xBF\xBD";
  constexpr char kAdded = '\xFF';  // in front of added tokens, which are text
  const auto& text = of(id);
  if (tokenizer_ == nullptr || text.find(kReplacement) == text.npos) return text;
  if (bytes_.empty()) bytes_ = tokenizer_->token_bytes(tokenizer_->vocab_size(), kAdded);
  const auto index = static_cast<std::size_t>(id);
  const bool is_own = index < bytes_.size() && !bytes_[index].empty() && bytes_[index][0] != kAdded;
  return is_own ? bytes_[index] : text;
}

}  // namespace ferry::serve
