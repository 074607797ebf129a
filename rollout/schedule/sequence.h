// One sample of a request during generation: its tokens, how many of them are in the cache, and its
// blocks there. Scheduler and BlockManager change it; the engine reads it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "rollout/schedule/sampling_params.h"

namespace ferry::rollout {

namespace grammar {
class TokenConstraint;
}
struct VisualPrompt;  // rollout/vision

// Hash of all tokens up to the end of a block.
struct PrefixHash {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  bool operator==(const PrefixHash&) const = default;
  // For unordered containers.
  struct Low {
    std::size_t operator()(const PrefixHash& hash) const { return hash.low; }
  };
};

// A prefix of a sequence whose states of linear attention others may begin with.
struct KeptPrefix {
  std::int64_t tokens = 0;
  PrefixHash hash{};
};

enum class SequenceStatus : std::uint8_t { kWaiting, kRunning, kFinished };

// The reason why a sequence ended, in vLLM's terms; kNone while it continues.
enum class FinishReason : std::uint8_t {
  kNone,
  kStop,    // a stop token or the end of sequence
  kLength,  // max_tokens, or the longest sequence that the engine takes
  kAbort,   // on request
  kError,   // the request was refused, or the vocabulary cannot write its format
};

struct Sequence {
  std::string request_id{};
  std::int64_t index = 0;           // of the request's samples
  std::uint64_t random_stream = 0;  // of the request and the index
  std::uint64_t seed = 0;
  std::shared_ptr<const SamplingParams> params{};
  std::shared_ptr<const std::vector<std::int64_t>> ending_tokens{};  // EOS and stop_token_ids
  std::shared_ptr<grammar::TokenConstraint> constraint{};            // of structured_outputs

  // A token that a step in flight draws: the host does not know it yet.
  static constexpr std::int64_t kUnknown = -1;

  std::shared_ptr<const VisualPrompt> visual{};  // images of the prompt, or null
  PrefixHash visual_hash{};  // of these: beginnings of tokens are alike if their images are

  std::vector<std::int64_t> token_ids{};  // the prompt, then the drawn tokens
  std::int64_t num_prompt_tokens = 0;

  SequenceStatus status = SequenceStatus::kWaiting;
  FinishReason finish_reason = FinishReason::kNone;

  // A block of a table whose keys no row sees any more.
  static constexpr std::int32_t kNoBlock = -1;

  std::int64_t num_computed_tokens = 0;  // with keys and values in the cache
  std::int64_t num_cached_tokens = 0;    // of these, found there when the sequence began
  std::chrono::steady_clock::time_point first_step{};  // once it has been computed in any
  // The blocks of each group of layers (kv_cache_groups.h), in order.
  std::vector<std::vector<std::int32_t>> block_tables{};
  std::vector<PrefixHash> block_hashes{};  // of the blocks that the prefix cache knows
  std::int64_t state_slot = -1;  // of linear attention's states; -1 while it has no blocks
  // Tokens that it had when it began, which are computed by the rule in chunks; 0 without states.
  std::int64_t num_prefill_tokens = 0;
  std::vector<KeptPrefix> kept_prefixes{};  // to come, ascending: a step ends behind each
  std::int64_t copied_state = -1;  // in its first step: the slot that its states begin as, or -1
  std::int64_t kept_state = -1;    // in a step that ends behind a kept prefix: the slot, or -1
  // In the first step: the blocks that its last ones begin as, one of each group; or none.
  std::vector<std::int32_t> copied_from{};
  // The log-probabilities of its prompt are still to be returned: all of it is computed.
  bool wants_prompt_logprobs = false;
  std::int64_t num_routed_tokens = 0;  // tokens whose routes have been returned
  std::int64_t num_preemptions = 0;
  std::int64_t drawn_at = -1;  // index among the tokens that the step in flight draws
  bool is_complete = false;    // its last token is drawn, or in flight

  bool has_blocks() const { return !block_tables.empty() && !block_tables.front().empty(); }
  std::int64_t size() const { return static_cast<std::int64_t>(token_ids.size()); }
  bool has_unknown() const { return token_ids.back() == kUnknown; }
  std::int64_t num_output_tokens() const { return size() - num_prompt_tokens; }
  std::span<const std::int64_t> prompt() const {
    return std::span(token_ids).first(static_cast<std::size_t>(num_prompt_tokens));
  }
  // The tokens that must not be drawn next, because they would end it before min_tokens.
  std::span<const std::int64_t> forbidden() const {
    if (num_output_tokens() >= params->min_tokens) return {};
    return *ending_tokens;
  }
  std::span<const std::int64_t> output() const {
    return std::span(token_ids).subspan(static_cast<std::size_t>(num_prompt_tokens));
  }
};

}  // namespace ferry::rollout
