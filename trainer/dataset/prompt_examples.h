// Prompts as the policy sees them: the tokens of the chat template's text up to where the answer
// begins.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "rollout/text/chat_template.h"
#include "rollout/text/tokenizer/tokenizer.h"
#include "trainer/config/ppo_config.h"
#include "trainer/data/examples.h"

namespace ferry::trainer {

struct EncodedPrompt {
  PromptExample example{};
  std::vector<std::int64_t> tokens{};
};

class PromptEncoder {
 public:
  // tokenizer.json and the chat template of `folder`. Throws Error if there is no tokenizer.
  PromptEncoder(const std::filesystem::path& folder, const PpoDataConfig& data);
  ~PromptEncoder();

  // Without a chat template the prompt has to be one message: its text with the special tokens of
  // the tokenizer. Throws Error(kCorrupt), which makes the record malformed, for one that is not,
  // for one that is filtered, and for one without a token; Error(kUsage) for one that is too long.
  EncodedPrompt encode(PromptExample example) const;

  // The text of an answer, or of a prompt.
  std::string decode(std::span<const std::int64_t> tokens, bool skip_special_tokens) const;

  const rollout::text::Tokenizer& tokenizer() const { return *tokenizer_; }
  std::vector<std::int64_t> eos_token_ids() const { return eos_token_ids_; }

 private:
  PpoDataConfig data_;
  std::unique_ptr<rollout::text::Tokenizer> tokenizer_;
  std::optional<rollout::text::ChatTemplate> template_;
  std::vector<std::int64_t> eos_token_ids_;
};

}  // namespace ferry::trainer
