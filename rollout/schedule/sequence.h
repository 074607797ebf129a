// One sample of a request while it is generated: its tokens, how many of them the cache knows, and
// in which blocks. Scheduler and BlockManager change it; the engine reads it out.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "rollout/schedule/sampling_params.h"

namespace ferry::rollout {

enum class SequenceStatus : std::uint8_t { kWaiting, kRunning, kFinished };

// Why a sequence ended, as vLLM names it; kNone while it goes on.
enum class FinishReason : std::uint8_t {
  kNone,
  kStop,    // a stop token or the end of sequence
  kLength,  // max_tokens, or the longest sequence that the engine takes
  kAbort,   // on request
  kError,   // the request was refused
};

struct Sequence {
  std::string request_id{};
  std::int64_t index = 0;           // of the request's samples
  std::uint64_t random_stream = 0;  // of the request and the index
  std::uint64_t seed = 0;
  std::shared_ptr<const SamplingParams> params{};
  std::shared_ptr<const std::vector<std::int64_t>> ending_tokens{};  // EOS and stop_token_ids

  // A token that a step under way draws: the host does not know it yet.
  static constexpr std::int64_t kUnknown = -1;

  std::vector<std::int64_t> token_ids{};  // the prompt, then what was drawn
  std::int64_t num_prompt_tokens = 0;

  SequenceStatus status = SequenceStatus::kWaiting;
  FinishReason finish_reason = FinishReason::kNone;
  std::int64_t stop_token = -1;  // of kStop

  std::int64_t num_computed_tokens = 0;     // whose keys and values are in the cache
  std::int64_t num_cached_tokens = 0;       // of these, found there when it was scheduled first
  std::vector<std::int32_t> block_table{};  // the blocks, in order
  std::int64_t num_hashed_blocks = 0;       // of block_table, known to the prefix cache
  std::int32_t copied_from =
      -1;  // in its first step: the block whose beginning its last one copies
  std::int64_t num_routed_tokens = 0;  // whose routes have been handed out
  std::int64_t num_preemptions = 0;
  std::int64_t drawn_at = -1;  // where the step under way draws for it
  bool is_complete = false;    // its last token is drawn, or under way

  std::int64_t size() const { return static_cast<std::int64_t>(token_ids.size()); }
  bool has_unknown() const { return token_ids.back() == kUnknown; }
  std::int64_t num_output_tokens() const { return size() - num_prompt_tokens; }
  std::span<const std::int64_t> prompt() const {
    return std::span(token_ids).first(static_cast<std::size_t>(num_prompt_tokens));
  }
  // The tokens that may not be drawn next: those that would end it before min_tokens.
  std::span<const std::int64_t> forbidden() const {
    if (num_output_tokens() >= params->min_tokens) return {};
    return *ending_tokens;
  }
  std::span<const std::int64_t> output() const {
    return std::span(token_ids).subspan(static_cast<std::size_t>(num_prompt_tokens));
  }
};

}  // namespace ferry::rollout
