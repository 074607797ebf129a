#include "rollout/step_memory.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "models/device/device.h"
#include "models/device/memory_error.h"
#include "models/distributed/world.h"
#include "models/kernels/attention/paged_attention.h"
#include "models/spec/costs.h"
#include "rollout/kv_cache.h"

namespace ferry::rollout {
namespace {

// Every kind of number that a draw can be asked for, except sampling masks, which requests for
// generation alone do not ask for.
const SamplingParams kAll{.temperature = 0.5, .top_p = 0.5, .logprobs = 1};

// A sequence whose last tokens are new. All its keys are in block 0 of each group, its states in
// slot 0: their values do not matter.
Sequence dummy(std::size_t num_groups, std::int64_t tokens, std::int64_t num_new_tokens) {
  return {.params = std::make_shared<const SamplingParams>(kAll),
          .ending_tokens = std::make_shared<const std::vector<std::int64_t>>(),
          .token_ids = std::vector<std::int64_t>(static_cast<std::size_t>(tokens)),
          .num_prompt_tokens = tokens,
          .num_computed_tokens = tokens - num_new_tokens,
          .block_tables = {num_groups, std::vector<std::int32_t>(
                                           static_cast<std::size_t>(KVCache::blocks_of(tokens)))},
          .state_slot = 0};
}

std::vector<Sequence> many_begin(const RunnerLimits& limits, std::size_t num_groups) {
  const auto count = std::min(limits.max_num_seqs, limits.max_num_batched_tokens);
  std::vector<Sequence> sequences;
  for (std::int64_t i = 0; i < count; ++i) {  // shorter ones first, like the scheduler
    const auto tokens = (limits.max_num_batched_tokens + i) / count;
    sequences.push_back(dummy(num_groups, std::min(tokens, limits.max_model_len),
                              std::min(tokens, limits.max_model_len)));
  }
  return sequences;
}

std::vector<Sequence> the_longest_ends(const RunnerLimits& limits, std::size_t num_groups) {
  return {dummy(num_groups, limits.max_model_len,
                std::min(limits.max_model_len, limits.max_num_batched_tokens))};
}

// Chunks of prompts that have as many keys together as are gathered at a time, or more, behind a
// part of them that is cached.
std::vector<Sequence> many_continue(const RunnerLimits& limits, std::size_t num_groups) {
  const auto most = models::max_gathered_keys(limits.max_model_len, limits.max_num_batched_tokens);
  const auto tokens = std::min(limits.max_model_len, distckpt::ceil_div(most, std::int64_t{2}));
  const auto count = std::min({most / tokens + 1, limits.max_num_seqs,
                               distckpt::ceil_div(limits.max_num_batched_tokens, std::int64_t{2})});
  const auto rows =
      std::max<std::int64_t>(1, std::min(limits.max_num_batched_tokens / count, tokens - 1));
  return std::vector<Sequence>(static_cast<std::size_t>(count), dummy(num_groups, tokens, rows));
}

void run(ModelRunner& runner, KVCache& cache, std::vector<Sequence> sequences, bool has_states) {
  std::vector<ScheduledSequence> scheduled;
  for (auto& sequence : sequences) {
    if (has_states) sequence.num_prefill_tokens = sequence.size();
    scheduled.push_back(
        {.sequence = &sequence, .num_new_tokens = sequence.size() - sequence.num_computed_tokens});
  }
  auto step = runner.launch(scheduled, cache, nullptr);
  ModelRunner::collect(step);
}

}  // namespace

void take_largest_steps(const models::GPTModel& model, const RunnerLimits& limits) {
  auto eager = limits;
  eager.enforce_eager = true;
  ModelRunner runner(model, eager);
  KVCache cache(model, 1);
  const auto num_groups = cache.groups().windows.size();
  const bool has_states = model.config().has_linear_attention();
  run(runner, cache, many_begin(limits, num_groups), has_states);
  run(runner, cache, the_longest_ends(limits, num_groups), has_states);
  run(runner, cache, many_continue(limits, num_groups), has_states);
}

std::int64_t step_memory(const models::GPTModel& model, const RunnerLimits& limits) {
  const auto device = model.mesh().world().device();
  if (!device.is_cuda()) return 0;
  try {
    models::reset_peak_memory(device);
    const auto before = models::peak_memory(device);
    take_largest_steps(model, limits);
    return models::peak_memory(device) - before;
  } catch (const c10::Error& error) {
    throw models::out_of_memory(
        error,
        fmt::format("in a step of {} tokens of {} sequences, before there is a KV cache",
                    limits.max_num_batched_tokens, limits.max_num_seqs),
        "lower max_num_batched_tokens, max_num_seqs or max_model_len, or share the model over more "
        "ranks");
  }
}

std::int64_t gathered_bytes_per_block(const models::GPTModel& model) {
  const auto shape =
      models::key_value_shape(model.config(), model.mesh().shape().tp(), model.options().alignment);
  const bool in_place = !model.config().attn_logit_softcapping &&
                        models::paged_attention_cuda_supports(
                            model.mesh().world().device(),
                            models::scalar_type(model.options().dtype), shape.dim, shape.value_dim);
  return in_place ? 0
                  : 3 * KVCache::bytes_per_block(model) /
                        kv_cache_groups(model.config()).layers_per_block;
}

}  // namespace ferry::rollout
