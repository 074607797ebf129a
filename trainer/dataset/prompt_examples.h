// Prompts as the policy sees them: the tokens of the chat template's text up to where the answer
// begins.
#pragma once

#include <cstdint>
#include <filesystem>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "rollout/text/chat_template.h"
#include "rollout/text/reasoning_format.h"
#include "rollout/text/tokenizer/tokenizer.h"
#include "rollout/vision/prompt_images.h"
#include "rollout/vision/visual_prompt.h"
#include "trainer/config/ppo_config.h"
#include "trainer/data/examples.h"

namespace ferry::trainer {

struct EncodedPrompt {
  PromptExample example{};
  std::vector<std::int64_t> tokens{};
  std::string images{};  // as PromptEncoder::visual_prompt() takes them; "": none
};

class PromptEncoder {
 public:
  // tokenizer.json, the chat template and the image processor of `folder`. Throws Error if there is
  // no tokenizer. `tools`: the schemas of functions that the template shows to the model, those
  // that a record selects, or null.
  // `config`: of a model that may see.
  PromptEncoder(const std::filesystem::path& folder,
                const PpoDataConfig& data,
                nlohmann::ordered_json tools = {},
                const models::TransformerConfig& config = {});
  ~PromptEncoder();

  // Without a chat template the prompt has to be one message: its text with the special tokens of
  // the tokenizer. Throws Error(kCorrupt), which makes the record malformed, for one that is not,
  // for one that is filtered, and for one without a token; Error(kUsage) for one that is too long.
  EncodedPrompt encode(PromptExample example, bool shows_tools = true) const;
  // The images of a prompt, which is the beginning of `tokens`: decoded once for prompts that
  // follow each other. Null where `images` is empty. Called by one thread at a time.
  std::shared_ptr<const rollout::VisualPrompt> visual_prompt(
      const std::string& images, std::span<const std::int64_t> prompt) const;
  // Nothing for a model that does not see.
  const std::optional<rollout::ImageReader>& image_reader() const { return images_; }
  // The whole of a conversation as a prompt, however long. Needs a chat template. `tools`: that it
  // shows, or null. `images`: of the conversation, as visual_prompt() takes them.
  std::vector<std::int64_t> encode_messages(const Messages& messages,
                                            const nlohmann::ordered_json& tools,
                                            const std::string& images = {}) const;
  // The tokens that the chat template puts behind the last answer for the messages after it, up to
  // where the next answer begins; those that end the answer are not among them, since the model has
  // written its own. Together with the tokens before, they are what the whole conversation is
  // encoded as, wherever the template writes the answers as the model did. The last `count`
  // messages, at least one, come behind an answer. Throws Error(kUsage) without a chat template, or
  // for one that does not end an answer with one of eos_token_ids().
  std::vector<std::int64_t> encode_turn(const Messages& messages,
                                        std::size_t count,
                                        const nlohmann::ordered_json& tools) const;

  // The thoughts that an answer to these tokens begins with, if any.
  std::optional<rollout::text::Thoughts> thoughts_behind(
      std::span<const std::int64_t> prompt, const rollout::text::ReasoningFormat& format) const;

  // The text of an answer, or of a prompt.
  std::string decode(std::span<const std::int64_t> tokens, bool skip_special_tokens) const;

  const rollout::text::Tokenizer& tokenizer() const { return *tokenizer_; }
  const nlohmann::ordered_json& tools() const { return tools_; }
  std::vector<std::int64_t> eos_token_ids() const { return eos_token_ids_; }

 private:
  nlohmann::ordered_json tools_of(const PromptExample& example) const;
  std::string render(const Messages& messages, const nlohmann::ordered_json& tools) const;
  // Decoded, unless a prompt before has them, too.
  std::vector<rollout::ProcessedImage> read(const std::string& images) const;

  PpoDataConfig data_;
  std::unique_ptr<rollout::text::Tokenizer> tokenizer_;
  std::optional<rollout::text::ChatTemplate> template_, tool_template_;
  nlohmann::ordered_json variables_;  // data.apply_chat_template_kwargs
  nlohmann::ordered_json tools_;
  std::vector<std::int64_t> eos_token_ids_;
  std::optional<models::VisionConfig> vision_;
  std::optional<rollout::ImageReader> images_;
  // The last ones, the newest first.
  struct Decoded {
    std::string images{};
    std::vector<std::int64_t> prompt{};
    std::shared_ptr<const rollout::VisualPrompt> visual{};
  };
  mutable std::list<Decoded> decoded_;
};

}  // namespace ferry::trainer
