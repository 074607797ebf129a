// The text of one sample as its tokens come, up to a stop string. Without LibTorch: the server uses
// it as well.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "rollout/request_output.h"
#include "rollout/text/tokenizer/incremental_detokenizer.h"

namespace ferry::rollout {

std::string_view to_string(FinishReason reason);  // vLLM's "stop", "length", ...; "" for kNone

class SampleText {
 public:
  // Without a tokenizer (null) there is no text. The tokenizer outlives this.
  SampleText(const text::Tokenizer* tokenizer,
             std::span<const std::int64_t> prompt,
             text::DetokenizerOptions options);

  struct Part {
    std::string text{};          // will not change any more
    std::size_t num_tokens = 0;  // of the output: those behind a stop string do not count
    FinishReason finish_reason = FinishReason::kNone;
    std::optional<std::int64_t> stop_token{};  // for kStop: one of these two
    std::optional<std::string> stop_string{};
    bool is_ahead = false;  // the text has ended, and the engine does not know it yet
  };
  Part take(const CompletionOutput& output);
  // The rest of a text that ends for another reason.
  std::string finish() { return text_ ? text_->finish() : ""; }

 private:
  std::optional<text::IncrementalDetokenizer> text_{};
  bool includes_stop_ = false;
};

}  // namespace ferry::rollout
