#include "rollout/text/tokenizer/incremental_detokenizer.h"

#include <algorithm>
#include <string_view>
#include <utility>

namespace ferry::rollout::text {

IncrementalDetokenizer::IncrementalDetokenizer(const Tokenizer& tokenizer,
                                               std::span<const TokenId> prompt,
                                               DetokenizerOptions options)
    : stream_(tokenizer, {.skip_special_tokens = options.skip_special_tokens}),
      options_(std::move(options)) {
  std::size_t given = 0;
  for (const auto id : prompt) given += stream_.push(id).size();
  rest_of_prompt_ = tokenizer.decode(prompt, {.skip_special_tokens = options_.skip_special_tokens});
  rest_of_prompt_.erase(0, given);
}

std::string IncrementalDetokenizer::update(TokenId id) {
  ++num_tokens_;
  return take(stream_.push(id), false);
}

std::string IncrementalDetokenizer::finish() {
  return stop_reason_ ? "" : take(stream_.finish(), true);
}

std::string IncrementalDetokenizer::take(std::string text, bool is_last) {
  drop_prompt(text);
  pending_ += text;
  if (num_tokens_ > options_.min_tokens && cut_at_stop()) return std::exchange(pending_, "");
  const auto held = is_last ? 0 : held_bytes();
  auto certain = pending_.substr(0, pending_.size() - held);
  pending_.erase(0, certain.size());
  return certain;
}

// Removes the prompt's last characters, which the stream may return late. If it returns others, the
// answer has completed a character that the prompt began.
void IncrementalDetokenizer::drop_prompt(std::string& text) {
  const auto size = std::min(text.size(), rest_of_prompt_.size());
  if (size == 0) return;
  const bool is_prompt = rest_of_prompt_.starts_with(std::string_view(text).substr(0, size));
  rest_of_prompt_.erase(0, is_prompt ? size : rest_of_prompt_.size());
  if (is_prompt) text.erase(0, size);
}

bool IncrementalDetokenizer::cut_at_stop() {
  auto first = std::string::npos;
  for (const auto& stop : options_.stop) {
    const auto at = pending_.find(stop);
    if (at >= first) continue;
    first = at;
    stop_reason_ = stop;
  }
  if (stop_reason_)
    pending_.resize(first + (options_.include_stop_str_in_output ? stop_reason_->size() : 0));
  return stop_reason_.has_value();
}

// The length of the longest suffix that is the beginning of a stop string.
std::size_t IncrementalDetokenizer::held_bytes() const {
  std::size_t held = 0;
  for (const auto& stop : options_.stop)
    for (auto size = std::min(stop.size() - 1, pending_.size()); size > held; --size)
      if (pending_.ends_with(std::string_view(stop).substr(0, size))) held = size;
  return held;
}

}  // namespace ferry::rollout::text
