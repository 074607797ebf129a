// The model as the API sees it: its name, its limits, its texts.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "rollout/text/chat_template.h"
#include "rollout/text/reasoning_format.h"
#include "rollout/text/tokenizer/tokenizer.h"
#include "rollout/text/tool_calls.h"

namespace ferry::serve {

// The image files of a prompt, in the order of its places for them; null: there are none.
using ImageFiles = std::shared_ptr<const std::vector<std::string>>;

// Images in chats, for models that see.
struct ServedImages {
  // The text of a chat template with as many placeholders as the images have tokens. Throws Error
  // for a file that is no image, or is damaged.
  std::function<std::string(const std::string& text, const ImageFiles& files)> expand{};
  std::int64_t max_images = 16;        // of a chat
  std::string allowed_media_folder{};  // files below it may be named; empty: none
};

struct ServedModel {
  std::string name{};
  std::string root{};                // the checkpoint
  std::int64_t max_model_len = 0;    // tokens of a sequence, at most
  bool is_limited_by_cache = false;  // max_model_len is what the KV cache holds, the model more
  std::int64_t vocab_size = 0;
  std::int64_t max_num_seqs = 0;
  const rollout::text::Tokenizer* tokenizer = nullptr;  // or null; outlives this
  std::optional<rollout::text::ChatTemplate> chat_template{};
  std::optional<rollout::text::ChatTemplate> tool_template{};  // for requests with tools
  std::optional<rollout::text::ToolFormat> tool_format{};      // of calls in answers
  std::optional<rollout::text::ReasoningFormat> reasoning{};   // of thoughts in answers
  std::optional<ServedImages> images{};                        // nothing: they are refused

  // Throws ApiError 400 if there is none.
  const rollout::text::Tokenizer& require_tokenizer(const std::string& param) const;
  // The tokens of a text; `special`: with those that the tokenizer adds; `is_prompt`: of one that
  // is too long some beyond max_model_len. Throws as above.
  std::vector<std::int64_t> encode(const std::string& text,
                                   bool special,
                                   const std::string& param,
                                   bool is_prompt = false) const;
  // True if its answers are messages on channels.
  bool has_channels() const { return tool_format && rollout::text::has_channels(*tool_format); }
};

// The texts of single tokens, kept.
class TokenTexts {
 public:
  explicit TokenTexts(const rollout::text::Tokenizer* tokenizer) : tokenizer_(tokenizer) {}

  // "token_id:7" without a tokenizer.
  const std::string& of(std::int64_t id);
  // The same in bytes: a token that is a part of a character has its own, and no U+FFFD.
  const std::string& bytes_of(std::int64_t id);

 private:
  const rollout::text::Tokenizer* tokenizer_;
  std::unordered_map<std::int64_t, std::string> texts_;
  std::vector<std::string> bytes_{};  // of all tokens, once any is asked for that is no text
};

}  // namespace ferry::serve
