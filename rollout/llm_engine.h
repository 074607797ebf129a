// The engine: requests in, tokens out, a step at a time (nano-vllm's and vLLM's LLMEngine).
// Requests may come and go between any two steps; what a token's log-probability is does not depend
// on them.
//
// The ranks of a tensor parallel group each have an engine, are given the same requests in the same
// order and take the same steps. Not safe for calls from several threads at once.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/gpt_model.h"
#include "rollout/kv_cache.h"
#include "rollout/model_runner.h"
#include "rollout/request_output.h"
#include "rollout/routed_experts.h"
#include "rollout/schedule/block_manager.h"
#include "rollout/schedule/sampling_params.h"
#include "rollout/schedule/scheduler.h"

namespace ferry::rollout {

struct EngineOptions {
  std::int64_t max_num_seqs = 256;             // in one step
  std::int64_t max_num_batched_tokens = 8192;  // in one step
  std::int64_t max_model_len = 0;  // tokens of a sequence, at most. 0: as many as the model knows
  std::int64_t num_blocks = 0;     // of the KV cache. 0: what there is memory for
  // Share of the memory that is free on a GPU: what a step takes and, with the rest of it, the
  // cache.
  double gpu_memory_utilization = 0.9;
  std::int64_t kv_cache_bytes = std::int64_t{4} << 30;  // on the host
  bool enable_prefix_caching = true;
  bool enable_chunked_prefill = true;
  bool enforce_eager = false;  // no CUDA graphs
  // Outputs say where routers sent the tokens, of a model with experts.
  bool enable_return_routed_experts = false;
  std::vector<std::int64_t> eos_token_ids{};
  std::uint64_t seed = 0;  // of requests without one
};

struct EngineStats {
  std::int64_t num_blocks = 0;
  std::int64_t num_free_blocks = 0;
  std::int64_t num_waiting = 0;  // sequences
  std::int64_t num_running = 0;
  std::int64_t num_preemptions = 0;
  std::int64_t prompt_tokens = 0;  // computed, again after a preemption
  std::int64_t cached_tokens = 0;  // found in the prefix cache
  std::int64_t output_tokens = 0;
  std::int64_t steps = 0;
};

class LLMEngine {
 public:
  // The model outlives the engine. Throws Error(kUsage) if the options do not fit it,
  // Error(kDevice) if there is no memory for a cache.
  LLMEngine(models::GPTModel& model, EngineOptions options);

  // What is wrong with a request comes back with the next step as its answer. Throws Error(kUsage)
  // if the id is in use.
  void add_request(const std::string& request_id,
                   std::vector<std::int64_t> prompt_token_ids,
                   SamplingParams params);
  // Ends a request: nothing more comes of it. Returns false if it is not known, or over.
  bool abort(const std::string& request_id);
  // Ends one of its samples: the others go on.
  bool abort(const std::string& request_id, std::int64_t index);
  // Where data parallel ranks share out experts, of any of them: all ask, then all step or none
  // does.
  bool has_unfinished() const;

  // Returns what one step brought, by request in the order they were added. On a GPU the next step
  // has been launched by then, unless draws depend on the tokens of this one (penalties); a request
  // that is added now takes part in the one after it.
  std::vector<RequestOutput> step();

  // Call it when weights have been replaced in place: nothing that was computed with the old ones
  // is used again. Requests under way go on with the new ones, after their prompts and what was
  // drawn so far have been computed anew. Tensor parallel ranks do so between the same steps.
  void reset_prefix_cache();
  // Gives the memory of the KV cache back to the device (level 1), and that of the weights (2).
  // Requests under way wait, as after reset_prefix_cache(). Throws Error(kUsage) for another level.
  void sleep(int level = 1);
  // Takes the memory again; after level 2 weights have to be loaded into place before the next
  // step, through sharded_state_dict() asked for anew. Throws Error(kDevice) if there is not
  // enough.
  void wake_up();
  bool is_sleeping() const { return asleep_; }

  EngineStats stats() const;
  const EngineOptions& options() const { return options_; }

 private:
  struct Request {
    std::uint64_t number = 0;  // in the order they were added
    std::vector<std::unique_ptr<Sequence>> samples{};
  };

  void check(const std::vector<std::int64_t>& prompt, const SamplingParams& params) const;
  bool shares_experts() const;
  bool is_last(const Sequence& sequence, std::int64_t num_tokens) const;
  void drop(Sequence& sequence);
  bool launches_ahead() const;
  void drain();
  std::optional<StepInFlight> launch(const StepInFlight* before);
  std::vector<RequestOutput> collect(StepInFlight step, StepInFlight* next);
  FinishReason take(const DrawnToken& drawn, StepInFlight* next);

  models::GPTModel& model_;
  EngineOptions options_;
  KVCache cache_;
  BlockManager blocks_;
  Scheduler scheduler_;
  ModelRunner runner_;
  std::optional<RoutedExperts> routed_experts_;
  std::map<std::string, Request> requests_;
  std::optional<StepInFlight> in_flight_;
  std::vector<RequestOutput> ready_;  // for the next step() to return
  std::uint64_t num_requests_ = 0;
  EngineStats totals_;
  bool asleep_ = false;
};

}  // namespace ferry::rollout
