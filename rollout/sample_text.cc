#include "rollout/sample_text.h"

#include <utility>
#include <vector>

namespace ferry::rollout {

std::string_view to_string(FinishReason reason) {
  switch (reason) {
    case FinishReason::kNone:
      return "";
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kAbort:
      return "abort";
    case FinishReason::kError:
      return "error";
  }
  return "";
}

SampleText::SampleText(const text::Tokenizer* tokenizer,
                       std::span<const std::int64_t> prompt,
                       text::DetokenizerOptions options) {
  if (tokenizer == nullptr) return;
  includes_stop_ = options.include_stop_str_in_output;
  const std::vector<text::TokenId> ids(prompt.begin(), prompt.end());
  text_.emplace(*tokenizer, ids, std::move(options));
}

SampleText::Part SampleText::take(const CompletionOutput& output) {
  Part part;
  for (const auto& token : output.tokens) {
    ++part.num_tokens;
    const bool is_stop_token = output.stop_reason && &token == &output.tokens.back();
    if (!text_ || (is_stop_token && !includes_stop_)) continue;
    part.text += text_->update(static_cast<text::TokenId>(token.token_id));
    if (!text_->stop_reason()) continue;
    part.stop_string = text_->stop_reason();
    part.finish_reason = FinishReason::kStop;
    part.is_ahead = output.finish_reason == FinishReason::kNone;
    return part;
  }
  part.stop_token = output.stop_reason;
  part.finish_reason = output.finish_reason;
  if (part.finish_reason != FinishReason::kNone) part.text += finish();
  return part;
}

}  // namespace ferry::rollout
