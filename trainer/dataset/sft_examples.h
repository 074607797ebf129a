// Conversations as supervised fine-tuning sees them: the tokens of the chat template's text, and
// which of them are learned, those that the assistant says. Each turn is tokenized by itself, as
// the model sees it when it is used: the prompt up to where the answer begins, then the answer.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "rollout/text/chat_template.h"
#include "rollout/text/tokenizer/tokenizer.h"
#include "rollout/vision/prompt_images.h"
#include "rollout/vision/visual_prompt.h"
#include "trainer/config/sft_config.h"
#include "trainer/data/examples.h"

namespace ferry::trainer {

struct SftExample {
  std::vector<std::int64_t> tokens{};
  std::vector<bool> learned{};                            // of each token
  std::shared_ptr<const rollout::VisualPrompt> visual{};  // of a conversation with images

  std::int64_t size() const { return static_cast<std::int64_t>(tokens.size()); }
};

class SftEncoder {
 public:
  // tokenizer.json, the chat template and the image processor of `folder`. Throws Error if there is
  // no tokenizer.
  SftEncoder(const std::filesystem::path& folder,
             const DataConfig& data,
             const models::TransformerConfig& config);
  ~SftEncoder();

  // Throws Error(kUsage) for images that the model does not see, or that no template places.
  void require_seen(const Conversation& conversation) const;

  // Without a chat template the conversation has to be a prompt and its response: the special
  // tokens of the tokenizer, the prompt, the response and the end of text. Throws Error(kCorrupt)
  // where a template does not render a conversation's beginning as the beginning of the whole, for
  // a sequence that is too long, or would be cut in an image, and for one without a token to learn,
  // unless data.truncation has cut it off; Error(kUsage) for images that are not read, or that
  // require_seen() refuses.
  SftExample encode(const Conversation& conversation) const;

  const rollout::text::Tokenizer& tokenizer() const { return *tokenizer_; }
  // Nothing for a model that does not see.
  const std::optional<rollout::ImageReader>& image_reader() const { return images_; }

 private:
  SftExample encode_templated(const Conversation& conversation,
                              std::span<const rollout::ProcessedImage> images) const;
  SftExample encode_plain(const Conversation& conversation) const;
  void append(SftExample& example, const std::string& text, bool learned) const;
  void truncate(SftExample& example) const;

  DataConfig data_;
  std::unique_ptr<rollout::text::Tokenizer> tokenizer_;
  std::optional<rollout::text::ChatTemplate> template_;
  nlohmann::ordered_json variables_;  // data.apply_chat_template_kwargs
  std::optional<models::VisionConfig> vision_;
  std::optional<rollout::ImageReader> images_;
};

// The tokens that the model reads of an example, and those it is to say next: [tokens] each. The
// last position has nothing to say, and weight 0.
struct SftTensors {
  at::Tensor tokens{};   // int64
  at::Tensor labels{};   // int64: the token behind
  at::Tensor weights{};  // fp32: 1 where the label is learned
};
SftTensors tensors_of(const SftExample& example);

}  // namespace ferry::trainer
