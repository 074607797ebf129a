#include "rollout/model_runner.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "distckpt/error.h"
#include "models/kernels/paged_attention.h"
#include "models/transformer/attention.h"
#include "models/world.h"

namespace ferry::rollout {
namespace {

void add_top(std::vector<DrawnToken>& drawn, const SampledTokens& sampled) {
  const auto* const tokens = sampled.top_tokens.const_data_ptr<std::int64_t>();
  const auto* const logprobs = sampled.top_logprobs.const_data_ptr<float>();
  const auto widest = static_cast<std::size_t>(sampled.top_tokens.size(1));
  for (std::size_t i = 0; i < drawn.size(); ++i) {
    if (drawn[i].sequence == nullptr) continue;
    const auto count = static_cast<std::size_t>(drawn[i].sequence->params->logprobs.value_or(0));
    for (std::size_t j = i * widest; j < i * widest + std::min(count, widest); ++j)
      drawn[i].token.top.push_back({.token_id = tokens[j], .logprob = logprobs[j]});
  }
}

// Of sequences that begin, where the ends of their prompts are.
std::vector<CopiedSlot> slots_to_copy(std::span<const ScheduledSequence> scheduled) {
  std::vector<CopiedSlot> slots;
  for (const auto& [sequence, num_new_tokens] : scheduled) {
    if (sequence->copied_from < 0) continue;
    const auto last = sequence->num_computed_tokens / KVCache::kBlockSize;
    const auto to = sequence->block_table[static_cast<std::size_t>(last)];
    for (std::int64_t i = 0; i < sequence->num_computed_tokens % KVCache::kBlockSize; ++i)
      slots.push_back({.from = sequence->copied_from * KVCache::kBlockSize + i,
                       .to = to * KVCache::kBlockSize + i});
  }
  return slots;
}

// On the host, once the device has come so far.
at::Tensor begin_download(const at::Tensor& x) {
  if (!x.defined() || !x.is_cuda()) return x.defined() ? x.contiguous() : x;
  auto host = at::empty(x.sizes(), x.options().device(at::kCPU).pinned_memory(true));
  host.copy_(x, /*non_blocking=*/true);
  return host;
}

// Whether a step of decoding asks the host for nothing: routers of experts count their tokens
// there, and collectives are watched from there.
bool can_capture(const models::GPTModel& model) {
  const auto shape = models::key_value_shape(
      model.config(), model.mesh().shape().tp(), model.options().alignment);
  return !model.config().num_moe_experts && model.mesh().shape().tp() == 1 &&
         models::paged_attention_cuda_supports(model.mesh().world().device(),
                                               models::scalar_type(model.options().dtype),
                                               shape.dim, shape.value_dim);
}

}  // namespace

ModelRunner::ModelRunner(const models::GPTModel& model, RunnerLimits limits)
    : model_(model),
      rows_multiple_(model.mesh().shape().tp()),
      captures_graphs_(!limits.enforce_eager && can_capture(model)),
      enable_return_routed_experts_(limits.enable_return_routed_experts) {
  require(model.config().head == distckpt::Head::kLanguageModel, ErrorKind::kUsage,
          "generation needs a language model's head");
  const auto sequences = DecodeGraphs::bucket_of(limits.max_num_seqs) + rows_multiple_;
  const auto rows = std::max(limits.max_num_batched_tokens + rows_multiple_, sequences);
  const auto blocks = (limits.max_model_len + KVCache::kBlockSize - 1) / KVCache::kBlockSize;
  tokens_ = make_buffer({rows}, at::kLong);
  positions_ = make_buffer({rows}, at::kLong);
  slots_ = make_buffer({rows}, at::kLong);
  lengths_ = make_buffer({sequences}, at::kInt);
  block_tables_ = make_buffer({sequences, blocks}, at::kInt);
  copied_slots_ = make_buffer({limits.max_num_seqs * KVCache::kBlockSize, 2}, at::kLong);
  last_rows_ = make_buffer({limits.max_num_seqs}, at::kLong);
  unknown_ = make_buffer({2, limits.max_num_seqs}, at::kLong);
}

ModelRunner::Buffer ModelRunner::make_buffer(at::IntArrayRef shape, at::ScalarType dtype) const {
  const auto device = model_.mesh().world().device();
  const auto options = at::TensorOptions().dtype(dtype);
  if (!device.is_cuda()) {
    const auto both = at::zeros(shape, options);
    return {.hosts = {both, both}, .device = both};
  }
  const auto host = [&] { return at::zeros(shape, options.pinned_memory(true)); };
  return {.hosts = {host(), host()}, .device = at::zeros(shape, options.device(device))};
}

at::Tensor ModelRunner::Buffer::upload(std::int64_t rows) const {
  auto part = device.narrow(0, 0, rows);
  if (device.is_cuda()) part.copy_(hosts[side].narrow(0, 0, rows), /*non_blocking=*/true);
  return part;
}

StepInFlight ModelRunner::launch(std::span<const ScheduledSequence> scheduled,
                                 KVCache& cache,
                                 const StepInFlight* before) {
  const at::NoGradGuard no_grad;
  for (auto* const buffer :
       {&tokens_, &positions_, &slots_, &lengths_, &block_tables_, &copied_slots_, &last_rows_,
        &unknown_})
    buffer->side = 1 - buffer->side;
  StepInFlight step{.copied_slots = slots_to_copy(scheduled)};
  StepRoutes routes(model_);
  const bool keeps = enable_return_routed_experts_;
  const auto hidden =
      forward(scheduled, cache, before, step.copied_slots, keeps ? routes.recording() : models::RouterReplay{});
  draw(scheduled, hidden, step);
  if (keeps) keep_routes(scheduled, routes, step);
  const bool comes_down = !step.drawn.empty() || !step.slots.empty();
  if (comes_down && hidden.is_cuda()) {
    step.done = std::make_shared<c10::Event>(c10::DeviceType::CUDA);
    step.done->record(
        c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(hidden.device()));
  }
  return step;
}

void ModelRunner::collect(StepInFlight& step) {
  if (step.done) step.done->synchronize();
  if (step.drawn.empty()) return;
  const auto* const tokens = step.results.tokens.const_data_ptr<std::int64_t>();
  const auto* const logprobs = step.results.logprobs.const_data_ptr<float>();
  const auto* const processed = step.results.processed_logprobs.const_data_ptr<float>();
  for (std::size_t i = 0; i < step.drawn.size(); ++i)
    step.drawn[i].token = {
        .token_id = tokens[i], .logprob = logprobs[i], .processed_logprob = processed[i]};
  if (step.results.top_tokens.defined()) add_top(step.drawn, step.results);
}

void ModelRunner::forget_graphs() {
  graphs_.reset();
}

// [rows, hidden], those that fill the step up behind the others.
at::Tensor ModelRunner::forward(std::span<const ScheduledSequence> scheduled,
                                KVCache& cache,
                                const StepInFlight* before,
                                std::span<const CopiedSlot> copied_slots,
                                const models::RouterReplay& routes) {
  const bool all_decode = std::ranges::all_of(
      scheduled, [](const ScheduledSequence& one) { return one.num_new_tokens == 1; });
  if (captures_graphs_ && all_decode && copied_slots.empty()) {
    const auto count = static_cast<std::int64_t>(scheduled.size());
    const auto rows = fill_rows(scheduled, DecodeGraphs::bucket_of(count));
    for (const auto* const buffer : {&tokens_, &positions_, &slots_, &lengths_, &block_tables_})
      (void)buffer->upload(rows);
    fill_in_unknown(scheduled, before);
    if (!graphs_) {
      graphs_.emplace([this, &cache](std::int64_t bucket) { return decode(bucket, cache); });
    }
    return graphs_->replay(rows);
  }
  // Tensor parallel ranks share out rows in equal parts where there are experts.
  const auto rows = fill_rows(scheduled, rows_multiple_);
  const auto step = make_step(scheduled, rows, copied_slots);
  PagedContext context(cache, step);
  const auto tokens = tokens_.upload(rows);
  fill_in_unknown(scheduled, before);
  return model_.forward(tokens, positions_.upload(rows), context, routes);
}

// Tokens that are under way, out of the step that draws them.
void ModelRunner::fill_in_unknown(std::span<const ScheduledSequence> scheduled,
                                  const StepInFlight* before) {
  auto* const rows = unknown_.data<std::int64_t>();
  auto* const from = rows + unknown_.device.size(1);
  std::int64_t count = 0;
  std::int64_t row = 0;
  for (const auto& [sequence, num_new_tokens] : scheduled) {
    row += num_new_tokens;
    if (!sequence->has_unknown() ||
        sequence->num_computed_tokens + num_new_tokens < sequence->size())
      continue;
    rows[count] = row - 1;
    from[count++] = sequence->drawn_at;
  }
  if (count == 0) return;
  require(before != nullptr, ErrorKind::kBug, "a token of no step is not known");
  const auto both = unknown_.upload(2).narrow(1, 0, count);
  tokens_.device.index_copy_(0, both[0], before->tokens.index_select(0, both[1]));
}

at::Tensor ModelRunner::decode(std::int64_t rows, KVCache& cache) const {
  const auto first = [rows](const Buffer& buffer) { return buffer.device.narrow(0, 0, rows); };
  const PagedStep step{.slots = first(slots_),
                       .block_tables = first(block_tables_),
                       .lengths = first(lengths_),
                       .num_decodes = rows};
  PagedContext context(cache, step);
  return model_.forward(first(tokens_), first(positions_), context);
}

// Returns how many, up to a multiple.
std::int64_t ModelRunner::fill_rows(std::span<const ScheduledSequence> scheduled,
                                    std::int64_t multiple) {
  auto* const tokens = tokens_.data<std::int64_t>();
  auto* const positions = positions_.data<std::int64_t>();
  auto* const slots = slots_.data<std::int64_t>();
  auto* lengths = lengths_.data<std::int32_t>();
  auto* table = block_tables_.data<std::int32_t>();
  std::int64_t row = 0;
  for (const auto& [sequence, num_new_tokens] : scheduled) {
    const auto begin = sequence->num_computed_tokens;
    for (auto position = begin; position < begin + num_new_tokens; ++position, ++row) {
      const auto block =
          sequence->block_table[static_cast<std::size_t>(position / KVCache::kBlockSize)];
      tokens[row] = sequence->token_ids[static_cast<std::size_t>(position)];
      positions[row] = position;
      slots[row] = block * KVCache::kBlockSize + position % KVCache::kBlockSize;
    }
    *lengths++ = static_cast<std::int32_t>(begin + num_new_tokens);
    std::ranges::copy(sequence->block_table, table);
    table += block_tables_.device.size(1);
  }
  for (; row == 0 || row % multiple != 0; ++row) {
    tokens[row] = 0;
    positions[row] = 0;
    slots[row] = -1;
    *lengths++ = 0;
  }
  return row;
}

PagedStep ModelRunner::make_step(std::span<const ScheduledSequence> scheduled,
                                 std::int64_t rows,
                                 std::span<const CopiedSlot> copied_slots) const {
  const auto count = static_cast<std::int64_t>(scheduled.size());
  std::size_t widest = 0;
  PagedStep step{.slots = slots_.upload(rows), .lengths = lengths_.upload(count)};
  const auto tables = block_tables_.upload(count);
  std::int64_t row = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto& [sequence, num_new_tokens] = scheduled[static_cast<std::size_t>(i)];
    step.chunks.push_back({.row_begin = row,
                           .num_rows = num_new_tokens,
                           .num_keys = sequence->num_computed_tokens + num_new_tokens,
                           .blocks = tables.select(0, i)});
    row += num_new_tokens;
    if (num_new_tokens > 1) continue;
    ++step.num_decodes;
    widest = std::max(widest, sequence->block_table.size());
  }
  step.lengths = step.lengths.narrow(0, 0, step.num_decodes);
  step.block_tables =
      tables.narrow(0, 0, step.num_decodes).narrow(1, 0, static_cast<std::int64_t>(widest));
  if (copied_slots.empty()) return step;
  auto* both = copied_slots_.data<std::int64_t>();
  for (const auto& slot : copied_slots) {
    *both++ = slot.from;
    *both++ = slot.to;
  }
  step.copied_slots =
      copied_slots_.upload(static_cast<std::int64_t>(copied_slots.size())).t().contiguous();
  return step;
}

void ModelRunner::draw(std::span<const ScheduledSequence> scheduled,
                       const at::Tensor& hidden,
                       StepInFlight& step) {
  std::vector<SamplingRow> sampling;
  auto* const last = last_rows_.data<std::int64_t>();
  std::int64_t row = 0;
  for (const auto& [sequence, num_new_tokens] : scheduled) {
    row += num_new_tokens;
    if (sequence->num_computed_tokens + num_new_tokens < sequence->size()) continue;
    last[step.drawn.size()] = row - 1;
    step.drawn.push_back({.sequence = sequence, .position = sequence->size()});
    sampling.push_back({.params = sequence->params.get(),
                        .seed = sequence->seed,
                        .request = sequence->random_stream,
                        .position = sequence->size(),
                        .prompt = sequence->prompt(),
                        .output = sequence->output(),
                        .forbidden = sequence->forbidden()});
  }
  if (step.drawn.empty()) return;
  const auto rows = last_rows_.upload(static_cast<std::int64_t>(step.drawn.size()));
  const auto logits = model_.whole_output(hidden.index_select(0, rows)).contiguous();
  const auto sampled = sample(logits, model_.config().vocab_size, sampling);
  step.tokens = sampled.tokens;
  step.results = {.tokens = begin_download(sampled.tokens),
                  .logprobs = begin_download(sampled.logprobs),
                  .processed_logprobs = begin_download(sampled.processed_logprobs),
                  .top_tokens = begin_download(sampled.top_tokens),
                  .top_logprobs = begin_download(sampled.top_logprobs)};
}

// Rows that fill the step up have none.
void ModelRunner::keep_routes(std::span<const ScheduledSequence> scheduled,
                              const StepRoutes& routes,
                              StepInFlight& step) const {
  std::int64_t rows = 0;
  for (const auto& one : scheduled) rows += one.num_new_tokens;
  const auto* const slots = slots_.data<std::int64_t>();
  step.slots.assign(slots, slots + rows);
  step.routed_experts = begin_download(routes.gather().narrow(0, 0, rows));
  for (auto& drawn : step.drawn) drawn.block_table = drawn.sequence->block_table;
}

}  // namespace ferry::rollout
