// Turns tokens into text during generation, and ends the text before a stop string (vLLM's
// IncrementalDetokenizer). Returned text never changes: it holds no part of a character and no
// beginning of a possible stop string.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "rollout/text/tokenizer/tokenizer.h"

namespace ferry::rollout::text {

struct DetokenizerOptions {
  std::vector<std::string> stop{};  // none of them empty
  std::int64_t min_tokens = 0;      // stop strings count only after more tokens than this
  bool skip_special_tokens = true;
  bool include_stop_str_in_output = false;  // the text ends behind a stop string
};

class IncrementalDetokenizer {
 public:
  // The text continues `prompt`, as in vLLM: a SentencePiece word keeps the space before it. The
  // tokenizer outlives this.
  IncrementalDetokenizer(const Tokenizer& tokenizer,
                         std::span<const TokenId> prompt,
                         DetokenizerOptions options = {});

  // Returns the text that is certain now. Must not be called after a stop string, nor with a stop
  // token, whose text is not part of the answer.
  std::string update(TokenId id);
  // Returns the rest of the text. Called once, after the last token.
  std::string finish();

  // The stop string that the text ends before: the one that begins first, and of several at one
  // place the first in the list.
  const std::optional<std::string>& stop_reason() const { return stop_reason_; }

 private:
  std::string take(std::string text, bool is_last);
  void drop_prompt(std::string& text);
  bool cut_at_stop();
  std::size_t held_bytes() const;

  DecodeStream stream_;
  DetokenizerOptions options_;
  std::int64_t num_tokens_ = 0;
  std::string rest_of_prompt_{};  // text of the prompt that the stream still holds
  std::string pending_{};         // text that may become part of a stop string
  std::optional<std::string> stop_reason_{};
};

}  // namespace ferry::rollout::text
