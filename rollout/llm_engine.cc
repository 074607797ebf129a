#include "rollout/llm_engine.h"

#define XXH_INLINE_ALL
#include <ATen/ops/scalar_tensor.h>
#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <ranges>
#include <utility>

#include "distckpt/base/error.h"
#include "models/device/device.h"
#include "models/device/memory_error.h"
#include "models/distributed/world.h"
#include "rollout/step_memory.h"
#include "rollout/vision/vision_encoder.h"
#include "rollout/vision/visual_prompt.h"

namespace ferry::rollout {

using models::GPTModel;

namespace {

constexpr const char* kHowToFit =
    "lower max_num_batched_tokens (--max-num-batched-tokens) or max_num_seqs; "
    "gpu_memory_utilization "
    "(--gpu-memory-utilization) says how much the cache leaves";

EngineOptions completed(EngineOptions options, const GPTModel& model) {
  const auto known = model.config().max_generated_positions();
  if (options.max_model_len == 0) options.max_model_len = known;
  require(options.max_model_len > 0 && options.max_model_len <= known, ErrorKind::kUsage,
          "max_model_len is {}: the model {} {} positions", options.max_model_len,
          known < model.config().max_position_embeddings
              ? "has longrope, and is generated from up to original_max_position_embeddings,"
              : "knows",
          known);
  require(
      options.enable_chunked_prefill || options.max_num_batched_tokens >= options.max_model_len,
      ErrorKind::kUsage,
      "without chunked prefill max_num_batched_tokens ({}) has to be at least max_model_len ({})",
      options.max_num_batched_tokens, options.max_model_len);
  require(!options.enable_return_routed_experts || model.config().num_moe_experts > 0,
          ErrorKind::kUsage, "enable_return_routed_experts: the model has no experts");
  // Steps that end where states are kept are chunks of prompts.
  if (model.config().has_linear_attention() && !options.enable_chunked_prefill)
    options.enable_prefix_caching = false;
  // The cache takes what a GPU has beside the tower.
  if (options.vision && model.mesh().world().device().is_cuda()) options.vision->load();
  return options;
}

RunnerLimits limits_of(const EngineOptions& options) {
  return {.max_num_seqs = options.max_num_seqs,
          .max_num_batched_tokens = options.max_num_batched_tokens,
          .max_model_len = options.max_model_len,
          .enforce_eager = options.enforce_eager,
          .enable_return_routed_experts = options.enable_return_routed_experts,
          .vision = options.vision};
}

// On a GPU the share of the memory that is free beside the weights, less what a step takes.
std::int64_t cache_bytes(const EngineOptions& options, const GPTModel& model) {
  const auto device = model.mesh().world().device();
  const auto of_step = step_memory(model, limits_of(options));
  models::release_cached_memory(device);
  const auto free = models::free_memory(device);
  if (!free || options.gpu_memory_utilization == 0) return options.kv_cache_bytes;
  return static_cast<std::int64_t>(static_cast<double>(*free) * options.gpu_memory_utilization) -
         of_step;
}

models::LinearStateSlots state_slots(const EngineOptions& options, const GPTModel& model) {
  return models::linear_state_slots(model.config(), options.max_num_seqs,
                                    options.enable_prefix_caching);
}

// Routes are kept in the blocks of the first group, for as long as their sequence.
std::vector<Window> windows_of(const EngineOptions& options, const GPTModel& model) {
  auto windows = kv_cache_groups(model.config()).windows;
  if (options.enable_return_routed_experts) windows.front() = std::nullopt;
  return windows;
}

// The number of blocks that every rank has memory for: the least of all.
std::int64_t blocks_for(const EngineOptions& options, const GPTModel& model) {
  if (options.num_blocks > 0) return options.num_blocks;
  const auto& mesh = model.mesh();
  const auto slots = state_slots(options, model);
  const auto of_states = slots.total() * KVCache::bytes_per_slot(model);
  const auto bytes = cache_bytes(options, model) - of_states;
  const auto gathered = mesh.world().device().is_cuda() ? gathered_bytes_per_block(model) : 0;
  const auto mine = bytes / (KVCache::bytes_per_block(model) + gathered);
  const auto least =
      -mesh.tp()
           .all_reduce_max(at::scalar_tensor(-mine, at::kLong).to(mesh.world().device()))
           .item<std::int64_t>();
  const auto useful =
      options.max_num_seqs * most_blocks(windows_of(options, model), options.max_model_len,
                                         options.max_num_batched_tokens, KVCache::kBlockSize);
  if (least <= 0)
    throw models::OutOfMemory(
        ErrorKind::kDevice,
        fmt::format("no room for a KV cache: a block of {} tokens takes {} KiB, and beside "
                    "what a step of {} tokens needs{} there are {} KiB",
                    KVCache::kBlockSize, KVCache::bytes_per_block(model) >> 10,
                    options.max_num_batched_tokens,
                    of_states == 0 ? ""
                                   : fmt::format(" and the states of {} sequences and {} "
                                                 "prefixes, {} KiB,",
                                                 slots.sequences, slots.prefixes, of_states >> 10),
                    std::max<std::int64_t>(bytes, 0) >> 10),
        kHowToFit);
  return std::min(least, useful);
}

// A request with its own seed draws the same tokens under any id.
std::uint64_t random_stream(std::string_view request_id, std::int64_t index) {
  return XXH3_64bits_withSeed(request_id.data(), request_id.size(),
                              static_cast<std::uint64_t>(index));
}

}  // namespace

LLMEngine::LLMEngine(GPTModel& model, EngineOptions options)
    : model_(model),
      options_(completed(std::move(options), model)),
      cache_(model,
             blocks_for(options_, model),
             state_slots(options_, model).sequences + state_slots(options_, model).prefixes),
      blocks_(cache_.num_blocks(),
              KVCache::kBlockSize,
              options_.enable_prefix_caching,
              state_slots(options_, model).sequences,
              windows_of(options_, model),
              state_slots(options_, model).prefixes),
      scheduler_({.max_num_seqs = options_.max_num_seqs,
                  .max_num_batched_tokens = options_.max_num_batched_tokens,
                  .enable_chunked_prefill = options_.enable_chunked_prefill},
                 blocks_),
      runner_(model, limits_of(options_)) {
  if (options_.enable_return_routed_experts)
    routed_experts_.emplace(model, cache_.num_blocks(), KVCache::kBlockSize);
}

void LLMEngine::add_request(const std::string& request_id,
                            std::vector<std::int64_t> prompt_token_ids,
                            SamplingParams params,
                            const std::shared_ptr<const VisualPrompt>& visual) {
  require(!requests_.contains(request_id), ErrorKind::kUsage, "request {} is under way already",
          request_id);
  std::shared_ptr<grammar::CompiledGrammar> compiled;
  try {
    check(prompt_token_ids, params);
    require(visual == nullptr || (options_.vision && ModelRunner::sees_images(model_)),
            ErrorKind::kUsage,
            "images in a prompt need a model with a vision tower that is computed");
    if (visual) options_.vision->load();
    compiled = compile(params.structured_outputs);
  } catch (const Error& error) {
    ready_.push_back({.request_id = request_id, .finished = true, .error = error});
    return;
  }
  Request request{.number = num_requests_++};
  auto ending = params.ignore_eos ? std::vector<std::int64_t>() : options_.eos_token_ids;
  ending.insert(ending.end(), params.stop_token_ids.begin(), params.stop_token_ids.end());
  const auto ending_tokens = std::make_shared<const std::vector<std::int64_t>>(std::move(ending));
  const auto shared = std::make_shared<const SamplingParams>(std::move(params));
  for (std::int64_t i = 0; i < shared->n; ++i) {
    auto sequence = std::make_unique<Sequence>();
    sequence->request_id = request_id;
    sequence->index = i;
    sequence->seed = shared->seed.value_or(options_.seed);
    sequence->random_stream = random_stream(shared->seed ? "" : request_id, i);
    sequence->params = shared;
    sequence->ending_tokens = ending_tokens;
    if (compiled)
      sequence->constraint = std::make_shared<grammar::TokenConstraint>(compiled, ending_tokens);
    sequence->visual = visual;
    if (visual) sequence->visual_hash = visual->digest;
    sequence->wants_prompt_logprobs = i == 0 && shared->prompt_logprobs.has_value();
    sequence->token_ids = prompt_token_ids;
    sequence->num_prompt_tokens = sequence->size();
    scheduler_.add(*sequence);
    request.samples.push_back(std::move(sequence));
  }
  requests_.emplace(request_id, std::move(request));
}

// Null without a format.
std::shared_ptr<grammar::CompiledGrammar> LLMEngine::compile(const std::string& format) {
  if (format.empty()) return nullptr;
  require(options_.tokenizer != nullptr, ErrorKind::kUsage,
          "structured_outputs: the engine has no tokenizer");
  if (!structured_outputs_)
    structured_outputs_.emplace(*options_.tokenizer, model_.config().vocab_size);
  return structured_outputs_->compile(format);
}

// The blocks of a sequence of so many tokens, at most at a time.
std::int64_t LLMEngine::blocks_of(std::int64_t tokens) const {
  return most_blocks(blocks_.windows(), tokens, options_.max_num_batched_tokens,
                     blocks_.block_size());
}

std::int64_t LLMEngine::longest_sequence(std::int64_t num_blocks) const {
  const auto lengths = std::views::iota(std::int64_t{1}, options_.max_model_len + 1);
  const auto too_long = std::ranges::upper_bound(
      lengths, num_blocks, {}, [&](std::int64_t tokens) { return blocks_of(tokens); });
  return static_cast<std::int64_t>(too_long - lengths.begin());
}

void LLMEngine::check(const std::vector<std::int64_t>& prompt, const SamplingParams& params) const {
  params.verify();
  const auto tokens = static_cast<std::int64_t>(prompt.size());
  const auto vocab = model_.config().vocab_size;
  require(tokens > 0, ErrorKind::kUsage, "the prompt is empty");
  // The last token's keys are never computed: one may be drawn behind the last place.
  require(tokens < options_.max_model_len ||
              (tokens == options_.max_model_len && params.max_tokens == 1),
          ErrorKind::kUsage,
          "the prompt has {} tokens: with one more it is longer than max_model_len, {}", tokens,
          options_.max_model_len);
  for (std::size_t i = 0; i < prompt.size(); ++i) {
    require(prompt[i] >= 0 && prompt[i] < vocab, ErrorKind::kUsage,
            "token {} of the prompt is {}: the vocabulary has {}", i, prompt[i], vocab);
  }
  for (const auto id : params.stop_token_ids)
    require(id < vocab, ErrorKind::kUsage, "stop_token_ids: {} is no token: the vocabulary has {}",
            id, vocab);
  const auto most =
      std::max(tokens, std::min(tokens + params.max_tokens, options_.max_model_len) - 1);
  require(blocks_of(most) <= blocks_.num_blocks(), ErrorKind::kUsage,
          "a prompt of {} tokens and {} more can never fit the KV cache, of {} tokens", tokens,
          params.max_tokens,
          blocks_.num_blocks() / std::ssize(blocks_.windows()) * blocks_.block_size());
}

// Collects the step in flight, whose outputs the next step() returns.
void LLMEngine::drain() {
  if (!in_flight_) return;
  auto outputs = collect(*std::exchange(in_flight_, std::nullopt), nullptr);
  std::ranges::move(outputs, std::back_inserter(ready_));
}

bool LLMEngine::abort(const std::string& request_id) {
  const auto found = requests_.find(request_id);
  if (found == requests_.end()) return false;
  for (const auto& sequence : found->second.samples) {
    if (sequence->status != SequenceStatus::kFinished) drop(*sequence);
  }
  forget(found);
  return true;
}

bool LLMEngine::abort(const std::string& request_id, std::int64_t index) {
  drain();
  const auto found = requests_.find(request_id);
  if (found == requests_.end()) return false;
  const auto& samples = found->second.samples;
  const auto is_over = [](const auto& sample) {
    return sample->status == SequenceStatus::kFinished;
  };
  const auto& sample = samples.at(static_cast<std::size_t>(index));
  if (is_over(sample)) return false;
  drop(*sample);
  if (std::ranges::all_of(samples, is_over)) forget(found);
  return true;
}

void LLMEngine::forget(std::map<std::string, Request>::iterator request) {
  requests_.erase(request);
  if (structured_outputs_) structured_outputs_->trim();
}

// Discards a sequence and the token that the step in flight draws for it.
void LLMEngine::drop(Sequence& sequence) {
  if (in_flight_) {
    for (auto& drawn : in_flight_->drawn) {
      if (drawn.sequence == &sequence) drawn.sequence = nullptr;
    }
    for (auto& prompt : in_flight_->prompts) {
      if (prompt.sequence == &sequence) prompt.sequence = nullptr;
    }
  }
  scheduler_.remove(sequence);
}

bool LLMEngine::has_unfinished() const {
  return any_rank(!requests_.empty() || !ready_.empty());
}

bool LLMEngine::any_rank(bool mine) const {
  if (!shares_experts(model_)) return mine;
  const auto& mesh = model_.mesh();
  const auto flag = at::scalar_tensor(mine ? 1 : 0, at::kLong).to(mesh.world().device());
  return mesh.all().all_reduce_max(flag).item<std::int64_t>() != 0;
}

std::vector<RequestOutput> LLMEngine::step() {
  require(!asleep_, ErrorKind::kUsage, "the engine sleeps: wake_up() comes before the next step");
  auto outputs = std::exchange(ready_, {});
  if (!in_flight_) in_flight_ = launch(nullptr);
  if (!in_flight_) return outputs;
  std::optional<StepInFlight> next;
  if (launches_ahead()) next = launch(&*in_flight_);
  auto brought = collect(*std::exchange(in_flight_, std::nullopt), next ? &*next : nullptr);
  in_flight_ = std::move(next);
  std::ranges::move(brought, std::back_inserter(outputs));
  return outputs;
}

// Only a GPU computes while the host works, and ranks that share experts agree before each step.
bool LLMEngine::launches_ahead() const {
  return model_.mesh().world().device().is_cuda() && !shares_experts(model_) &&
         std::ranges::none_of(requests_, [](const auto& request) {
           return request.second.samples.front()->params->looks_back();
         });
}

// Returns no step if there is nothing to compute.
std::optional<StepInFlight> LLMEngine::launch(const StepInFlight* before) {
  if (!scheduler_.has_unfinished() && !shares_experts(model_)) return std::nullopt;
  const auto scheduled = scheduler_.schedule();
  if (scheduled.empty() && !shares_experts(model_)) return std::nullopt;
  const auto now = std::chrono::steady_clock::now();
  for (const auto& [sequence, num_new_tokens] : scheduled)
    if (sequence->first_step == std::chrono::steady_clock::time_point()) sequence->first_step = now;
  StepInFlight step;
  const auto forget = [&] {  // the blocks of this step have not been written
    scheduler_.preempt_all();
    blocks_.reset_prefix_cache();
  };
  try {
    step = runner_.launch(scheduled, cache_, before);
  } catch (const c10::Error& error) {
    forget();
    if (!models::is_out_of_memory(error)) throw;
    throw models::out_of_memory(error, fmt::format("in a step of {} sequences", scheduled.size()),
                                kHowToFit);
  } catch (...) {
    forget();
    throw;
  }
  ++totals_.steps;
  for (const auto& [sequence, num_new_tokens] : scheduled) {
    if (sequence->num_computed_tokens == sequence->num_cached_tokens)
      totals_.cached_tokens += sequence->num_cached_tokens;
    totals_.prompt_tokens += std::clamp<std::int64_t>(
        sequence->num_prompt_tokens - sequence->num_computed_tokens, 0, num_new_tokens);
    sequence->num_computed_tokens += num_new_tokens;
  }
  for (std::size_t i = 0; i < step.drawn.size(); ++i) {
    auto& sequence = *step.drawn[i].sequence;
    sequence.token_ids.push_back(Sequence::kUnknown);
    sequence.drawn_at = static_cast<std::int64_t>(i);
    sequence.is_complete = is_last(sequence, sequence.size());
  }
  return step;
}

// `next`: the step that was launched after it, or null.
std::vector<RequestOutput> LLMEngine::collect(StepInFlight step, StepInFlight* next) {
  ModelRunner::collect(step);
  if (routed_experts_) {
    routed_experts_->store(step.slots, step.routed_experts);
    routed_experts_->copy(step.copies.keys.front());
  }
  for (const auto& prompt : step.prompts) take(prompt);
  std::map<std::uint64_t, RequestOutput> of_requests;
  const auto now = std::chrono::steady_clock::now();
  for (auto& drawn : step.drawn) {
    if (drawn.sequence == nullptr) continue;
    auto& sequence = *drawn.sequence;
    const bool is_first = drawn.position == sequence.num_prompt_tokens;
    const auto reason = take(drawn, next);
    auto& request = requests_.at(sequence.request_id);
    auto& output = of_requests[request.number];
    output.request_id = sequence.request_id;
    if (std::exchange(sequence.wants_prompt_logprobs, false))
      output.prompt_logprobs = std::move(request.prompt_logprobs);
    auto& sample = output.outputs.emplace_back(
        CompletionOutput{.index = sequence.index, .finish_reason = reason});
    if (is_first) {
      sample.prefill_seconds = std::chrono::duration<double>(now - sequence.first_step).count();
      if (sequence.index == 0) output.num_cached_tokens = sequence.num_cached_tokens;
    }
    if (reason == FinishReason::kStop && !sequence.ending_tokens->empty())
      sample.stop_reason = drawn.token.token_id;
    sample.tokens.push_back(std::move(drawn.token));
    if (routed_experts_) {
      const auto begin = std::exchange(sequence.num_routed_tokens, drawn.position);
      sample.routed_experts = routed_experts_->read(drawn.block_table, begin, drawn.position);
    }
  }
  std::vector<RequestOutput> outputs;
  for (auto& [number, output] : of_requests) {
    const auto found = requests_.find(output.request_id);
    output.finished = std::ranges::all_of(found->second.samples, [](const auto& sample) {
      return sample->status == SequenceStatus::kFinished;
    });
    if (output.finished) forget(found);
    outputs.push_back(std::move(output));
  }
  return outputs;
}

// Stores those of a prompt; again, if it was computed again.
void LLMEngine::take(const ScoredPrompt& prompt) {
  if (prompt.sequence == nullptr) return;
  auto& known = requests_.at(prompt.sequence->request_id).prompt_logprobs;
  known.resize(static_cast<std::size_t>(prompt.position - 1));
  std::ranges::move(prompt.tokens(), std::back_inserter(known));
}

// Stores a drawn token. If it is the last one, the token that the next step draws is dropped.
FinishReason LLMEngine::take(const DrawnToken& drawn, StepInFlight* next) {
  auto& sequence = *drawn.sequence;
  const auto num_tokens = drawn.position + 1;
  sequence.token_ids[static_cast<std::size_t>(drawn.position)] = drawn.token.token_id;
  ++totals_.output_tokens;
  const auto& ending = *sequence.ending_tokens;
  if (num_tokens - sequence.num_prompt_tokens >= sequence.params->min_tokens &&
      std::ranges::find(ending, drawn.token.token_id) != ending.end())
    sequence.finish_reason = FinishReason::kStop;
  else if (is_last(sequence, num_tokens))
    sequence.finish_reason = FinishReason::kLength;
  if (sequence.constraint) {
    auto& constraint = *sequence.constraint;
    const bool ends = sequence.finish_reason == FinishReason::kStop;
    if (!ends) constraint.accept(drawn.token.token_id);
    if (ends ? !constraint.may_end() : constraint.has_left())
      sequence.finish_reason = FinishReason::kError;
    else if (ending.empty() && constraint.is_complete())
      sequence.finish_reason = FinishReason::kStop;
  }
  if (sequence.finish_reason == FinishReason::kNone) return FinishReason::kNone;
  if (sequence.size() > num_tokens) {
    next->drawn[static_cast<std::size_t>(sequence.drawn_at)].sequence = nullptr;
    sequence.token_ids.resize(static_cast<std::size_t>(num_tokens));
  }
  scheduler_.remove(sequence);
  return sequence.finish_reason;
}

// True if a sequence of so many tokens ends, for any last token.
bool LLMEngine::is_last(const Sequence& sequence, std::int64_t num_tokens) const {
  return num_tokens - sequence.num_prompt_tokens >= sequence.params->max_tokens ||
         num_tokens >= options_.max_model_len;
}

void LLMEngine::reset_prefix_cache() {
  drain();
  scheduler_.preempt_all();
  blocks_.reset_prefix_cache();
  if (options_.vision) options_.vision->forget();
}

void LLMEngine::sleep(int level) {
  require(level == 1 || level == 2, ErrorKind::kUsage,
          "sleep level {}: 1 gives back the KV cache, 2 the weights as well", level);
  reset_prefix_cache();
  runner_.forget_graphs();
  cache_.release();
  if (level == 2 && !model_.parameters().released()) model_.parameters().release();
  models::release_cached_memory(model_.mesh().world().device());
  asleep_ = true;
}

void LLMEngine::wake_up() {
  if (!asleep_) return;
  // Memory that LibTorch has cached is fragmented.
  models::release_cached_memory(model_.mesh().world().device());
  if (model_.parameters().released()) model_.parameters().restore();
  cache_.allocate();
  asleep_ = false;
}

EngineStats LLMEngine::stats() const {
  auto now = totals_;
  now.num_blocks = blocks_.num_blocks();
  now.num_free_blocks = blocks_.num_free_blocks();
  now.num_waiting = scheduler_.num_waiting();
  now.num_running = scheduler_.num_running();
  now.num_preemptions = scheduler_.num_preemptions();
  return now;
}

}  // namespace ferry::rollout
