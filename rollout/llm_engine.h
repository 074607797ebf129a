// The engine: requests in, tokens out, a step at a time (nano-vllm's and vLLM's LLMEngine).
// Requests may be added and aborted between any two steps; a token's log-probability does not
// depend on other requests.
//
// Each rank of a tensor parallel group has an engine, which gets the same requests in the same
// order and takes the same steps. Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/gpt_model.h"
#include "rollout/grammar/token_constraint.h"
#include "rollout/kv_cache.h"
#include "rollout/model_runner.h"
#include "rollout/request_output.h"
#include "rollout/routed_experts.h"
#include "rollout/schedule/block_manager.h"
#include "rollout/schedule/sampling_params.h"
#include "rollout/schedule/scheduler.h"

namespace ferry::rollout {

class VisionEncoder;  // rollout/vision

struct EngineOptions {
  std::int64_t max_num_seqs = 256;             // in one step
  std::int64_t max_num_batched_tokens = 8192;  // in one step
  std::int64_t max_model_len = 0;  // tokens of a sequence, at most. 0: the model's positions
  std::int64_t num_blocks = 0;     // of the KV cache. 0: as many as there is memory for
  // Share of a GPU's free memory for a step and the cache. 0: the cache has kv_cache_bytes.
  double gpu_memory_utilization = 0.9;
  std::int64_t kv_cache_bytes = std::int64_t{4} << 30;  // on the host
  bool enable_prefix_caching = true;  // with linear attention: only with chunked prefill
  bool enable_chunked_prefill = true;
  bool enforce_eager = false;  // no CUDA graphs
  // Outputs contain the experts that routers chose; the model has experts.
  bool enable_return_routed_experts = false;
  std::vector<std::int64_t> eos_token_ids{};
  std::uint64_t seed = 0;  // for requests without one
  // For requests with structured_outputs, which are refused without it. Outlives the engine.
  const text::Tokenizer* tokenizer = nullptr;
  std::shared_ptr<VisionEncoder> vision{};  // for prompts with images, which are refused without it
};

class LLMEngine {
 public:
  // The model outlives the engine. Throws Error(kUsage) if the options do not fit it,
  // Error(kDevice) if there is no memory for a cache.
  LLMEngine(models::GPTModel& model, EngineOptions options);

  // A request that is refused gets its error as the output of the next step. Throws Error(kUsage)
  // if the id is in use. `visual`: the images of the prompt, or null.
  void add_request(const std::string& request_id,
                   std::vector<std::int64_t> prompt_token_ids,
                   SamplingParams params,
                   const std::shared_ptr<const VisualPrompt>& visual = nullptr);
  // Ends a request, which gets no further output. Returns false if it is unknown or finished.
  bool abort(const std::string& request_id);
  // Ends one of its samples; the others continue.
  bool abort(const std::string& request_id, std::int64_t index);
  // If data parallel ranks share experts, this is a collective: true if any of them has requests,
  // and then all must step.
  bool has_unfinished() const;
  // True if it is on any rank that steps with this one: a collective of ranks that share experts.
  bool any_rank(bool mine) const;

  // Runs a step, and returns its outputs in the order in which requests were added. On a GPU the
  // next step is launched before this returns, unless its draws depend on this one's tokens
  // (SamplingParams::looks_back()); a request that is added then takes part in the step after it.
  std::vector<RequestOutput> step();

  // Called after weights have been replaced in place: results of the old ones are not used again.
  // Requests in flight continue with the new ones, after their tokens so far have been computed
  // again. Tensor parallel ranks call it between the same steps.
  void reset_prefix_cache();
  // Frees the memory of the KV cache (level 1), and also that of the weights (2). Requests in
  // flight wait, and are then computed again. Throws Error(kUsage) for another level.
  void sleep(int level = 1);
  // Takes the memory again. After level 2 the caller loads weights through a new
  // sharded_state_dict() before the next step. Throws Error(kDevice) if there is not enough memory.
  void wake_up();
  bool is_sleeping() const { return asleep_; }

  EngineStats stats() const;
  // Tokens of a sequence that fit max_model_len and a KV cache of so many blocks.
  std::int64_t longest_sequence(std::int64_t num_blocks) const;
  const EngineOptions& options() const { return options_; }

 private:
  struct Request {
    std::uint64_t number = 0;  // in the order they were added
    std::vector<std::unique_ptr<Sequence>> samples{};
    std::vector<PromptTokenOutput> prompt_logprobs{};  // so far, and until they are returned
  };

  std::int64_t blocks_of(std::int64_t tokens) const;
  void check(const std::vector<std::int64_t>& prompt, const SamplingParams& params) const;
  std::shared_ptr<grammar::CompiledGrammar> compile(const std::string& format);
  bool is_last(const Sequence& sequence, std::int64_t num_tokens) const;
  void drop(Sequence& sequence);
  void forget(std::map<std::string, Request>::iterator request);
  bool launches_ahead() const;
  void drain();
  std::optional<StepInFlight> launch(const StepInFlight* before);
  std::vector<RequestOutput> collect(StepInFlight step, StepInFlight* next);
  FinishReason take(const DrawnToken& drawn, StepInFlight* next);
  void take(const ScoredPrompt& prompt);

  models::GPTModel& model_;
  EngineOptions options_;
  KVCache cache_;
  BlockManager blocks_;
  Scheduler scheduler_;
  ModelRunner runner_;
  std::optional<RoutedExperts> routed_experts_;
  std::optional<grammar::StructuredOutputManager> structured_outputs_;  // once a request has them
  std::map<std::string, Request> requests_;
  std::optional<StepInFlight> in_flight_;
  std::vector<RequestOutput> ready_;  // for the next step() to return
  std::uint64_t num_requests_ = 0;
  EngineStats totals_;
  bool asleep_ = false;
};

}  // namespace ferry::rollout
