// Text out of tokens as they are generated, and the end of it where a stop string appears (vLLM's
// IncrementalDetokenizer). What was given out stands: no half of a character, no beginning of what
// may become a stop string.
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
  std::int64_t min_tokens = 0;      // before more than these, nothing is a stop string
  bool skip_special_tokens = true;
};

class IncrementalDetokenizer {
 public:
  // The text goes on where `prompt` ends, as vLLM has it: a word of SentencePiece keeps the space
  // before it. The tokenizer outlives this.
  IncrementalDetokenizer(const Tokenizer& tokenizer,
                         std::span<const TokenId> prompt,
                         DetokenizerOptions options = {});

  // Returns what is certain now. Not to be called after a stop string, or with a stop token, whose
  // text is not part of the answer.
  std::string update(TokenId id);
  // Returns the rest, which has to be asked for once, after the last token.
  std::string finish();

  // The stop string that ended the text. Of several, the one that begins first; of those the first
  // in the list. The text ends before it.
  const std::optional<std::string>& stop_reason() const { return stop_reason_; }

 private:
  std::string take(std::string text, bool is_last);
  void drop_prompt(std::string& text);
  bool cut_at_stop();
  std::size_t held_bytes() const;

  DecodeStream stream_;
  DetokenizerOptions options_;
  std::int64_t num_tokens_ = 0;
  std::string rest_of_prompt_{};  // its text that the stream has not given yet
  std::string pending_{};         // not given out yet
  std::optional<std::string> stop_reason_{};
};

}  // namespace ferry::rollout::text
