#include "trainer/dataset/prompt_examples.h"

#include <utility>

#include "distckpt/base/error.h"
#include "rollout/text/eos_token_ids.h"

namespace ferry::trainer {

using rollout::text::TokenId;

PromptEncoder::PromptEncoder(const std::filesystem::path& folder, const PpoDataConfig& data)
    : data_(data),
      tokenizer_(rollout::text::Tokenizer::from_folder(folder)),
      template_(rollout::text::ChatTemplate::from_folder(folder)),
      eos_token_ids_(
          rollout::text::eos_token_ids(rollout::text::ModelFiles(folder), tokenizer_.get())) {}

PromptEncoder::~PromptEncoder() = default;

EncodedPrompt PromptEncoder::encode(PromptExample example) const {
  std::vector<TokenId> ids;
  if (template_) {
    ids = tokenizer_->encode(template_->apply(example.prompt, {.add_generation_prompt = true}),
                             {.add_special_tokens = false});
  } else {
    require(example.prompt.size() == 1 && example.prompt[0].at("content").is_string(),
            ErrorKind::kCorrupt, "prompt: without a chat template it is one message of text");
    ids = tokenizer_->encode(example.prompt[0].at("content").get<std::string>());
  }
  require(!ids.empty(), ErrorKind::kCorrupt, "prompt: has no tokens");
  EncodedPrompt encoded{.example = std::move(example), .tokens = {ids.begin(), ids.end()}};
  auto& tokens = encoded.tokens;
  const auto surplus = static_cast<std::int64_t>(tokens.size()) - data_.max_prompt_length;
  if (surplus <= 0) return encoded;
  require(data_.filter_overlong_prompts || data_.truncation != Truncation::kError,
          ErrorKind::kUsage,
          "prompt: {} tokens, more than data.max_prompt_length of {}: raise it, or set "
          "data.filter_overlong_prompts or data.truncation",
          tokens.size(), data_.max_prompt_length);
  require(!data_.filter_overlong_prompts, ErrorKind::kCorrupt,
          "prompt: {} tokens, more than data.max_prompt_length of {}", tokens.size(),
          data_.max_prompt_length);
  if (data_.truncation == Truncation::kLeft)
    tokens.erase(tokens.begin(), tokens.begin() + surplus);
  else
    tokens.resize(static_cast<std::size_t>(data_.max_prompt_length));
  return encoded;
}

std::string PromptEncoder::decode(std::span<const std::int64_t> tokens,
                                  bool skip_special_tokens) const {
  const std::vector<TokenId> ids(tokens.begin(), tokens.end());
  return tokenizer_->decode(ids, {.skip_special_tokens = skip_special_tokens});
}

}  // namespace ferry::trainer
