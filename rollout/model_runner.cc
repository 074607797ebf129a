#include "rollout/model_runner.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "models/distributed/world.h"
#include "models/kernels/attention/paged_attention.h"
#include "models/spec/costs.h"
#include "models/transformer/moe.h"
#include "rollout/vision/vision_encoder.h"
#include "rollout/vision/visual_prompt.h"

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

void add_masks(std::vector<DrawnToken>& drawn, const models::SamplingMask& mask) {
  const auto* const ids = mask.token_ids.const_data_ptr<std::int32_t>();
  for (std::size_t i = 0; i < drawn.size(); ++i)
    drawn[i].token.sampling_mask.assign(ids + mask.offsets[i], ids + mask.offsets[i + 1]);
}

// True if the rows include a token that the step before draws.
bool takes_unknown(const ScheduledSequence& one) {
  return one.sequence->has_unknown() &&
         one.sequence->num_computed_tokens + one.num_new_tokens == one.sequence->size();
}

// A copy on the host, valid when the stream has reached this point.
at::Tensor begin_download(const at::Tensor& x) {
  if (!x.defined() || !x.is_cuda()) return x.defined() ? x.contiguous() : x;
  auto host = at::empty(x.sizes(), x.options().device(at::kCPU).pinned_memory(true));
  host.copy_(x, /*non_blocking=*/true);
  return host;
}

// Memory of the host for the numbers that a step draws.
DrawnNumbers pinned_numbers(std::int64_t rows) {
  const auto pinned = at::TensorOptions().pinned_memory(true);
  return {.tokens = at::empty({rows}, pinned.dtype(at::kLong)),
          .logprobs = at::empty({rows}, pinned.dtype(at::kFloat)),
          .processed_logprobs = at::empty({rows}, pinned.dtype(at::kFloat))};
}

// Positions of a token in time, height and width.
constexpr std::int64_t kAxes = 3;

// Bytes of the inputs of the largest step.
std::int64_t input_bytes(const RunnerLimits& limits,
                         std::int64_t rows_multiple,
                         std::int64_t groups) {
  const auto sequences =
      distckpt::round_up(DecodeGraphs::bucket_of(limits.max_num_seqs), rows_multiple);
  const auto rows = std::max(limits.max_num_batched_tokens, sequences) + rows_multiple;
  constexpr std::int64_t kInt = sizeof(std::int32_t);
  constexpr std::int64_t kLong = sizeof(std::int64_t);
  std::int64_t bytes = 0;
  for (const auto array :
       {kLong * rows, kAxes * kLong * rows, groups * kLong * rows, kInt * sequences,
        groups * kInt * sequences * KVCache::blocks_of(limits.max_model_len),
        groups * 2 * kLong * KVCache::kBlockSize * sequences, 2 * kLong * sequences,
        2 * kLong * sequences, kLong * sequences, kLong * sequences, kLong * sequences,
        std::int64_t{sizeof(DrawRow)} * sequences})
    bytes += StepInputs::bytes_of(array);
  return bytes;
}

// True if a step of decoding needs nothing from the host.
bool can_capture(const models::GPTModel& model) {
  const auto& mesh = model.mesh();
  const auto shape =
      models::key_value_shape(model.config(), mesh.shape().tp(), model.options().alignment);
  return !model.config().attn_logit_softcapping &&
         (!model.config().num_moe_experts || models::MoELayer::generates_on_device(mesh)) &&
         models::paged_attention_cuda_supports(mesh.world().device(),
                                               models::scalar_type(model.options().dtype),
                                               shape.dim, shape.value_dim);
}

// Tensor parallel ranks take equal parts of the rows where more ranks share the experts, where
// these need the host, or to keep routes.
std::int64_t multiple_of_rows(const models::GPTModel& model, const RunnerLimits& limits) {
  using models::MoELayer;
  const auto& mesh = model.mesh();
  const bool parts = model.config().num_moe_experts > 0 &&
                     (limits.enable_return_routed_experts || MoELayer::gathers_rows(mesh) ||
                      !MoELayer::generates_on_device(mesh));
  return parts ? mesh.shape().tp() : 1;
}

// The most rows of a rank for which ranks that share experts exchange all rows.
constexpr std::int64_t kMostEqualRows = 1024;

}  // namespace

bool shares_experts(const models::GPTModel& model) {
  const auto& mesh = model.mesh();
  return model.config().num_moe_experts > 0 &&
         mesh.ep().size() * mesh.etp().size() > mesh.tp().size();
}

ModelRunner::ModelRunner(const models::GPTModel& model, RunnerLimits limits)
    : model_(model),
      rows_multiple_(multiple_of_rows(model, limits)),
      max_num_seqs_(limits.max_num_seqs),
      max_blocks_(KVCache::blocks_of(limits.max_model_len)),
      max_gathered_keys_(
          models::max_gathered_keys(limits.max_model_len, limits.max_num_batched_tokens)),
      num_groups_(kv_cache_groups(model.config()).windows.size()),
      inputs_(input_bytes(limits, rows_multiple_, static_cast<std::int64_t>(num_groups_)),
              model.mesh().world().device()),
      captures_graphs_(!limits.enforce_eager && can_capture(model)),
      enable_return_routed_experts_(limits.enable_return_routed_experts),
      vision_(std::move(limits.vision)) {
  require(model.config().head == models::Head::kLanguageModel, ErrorKind::kUsage,
          "generation needs a language model's head");
  const auto& mesh = model.mesh();
  for (const auto* const group : {&mesh.tp(), &mesh.ep(), &mesh.etp()}) group->map_peer_memory();
  if (mesh.world().device().is_cuda()) {
    for (auto& one : results_) one = pinned_numbers(limits.max_num_seqs);
  }
}

StepInFlight ModelRunner::launch(std::span<const ScheduledSequence> scheduled,
                                 KVCache& cache,
                                 const StepInFlight* before) {
  const at::NoGradGuard no_grad;
  StepInFlight step{.copies = slot_copies(scheduled, num_groups_, KVCache::kBlockSize)};
  const bool copies = !step.copies.keys.front().empty();
  unseen_block_ = cache.unseen_block();
  unread_slot_ = cache.unread_slot();
  const auto sampling = begin_draws(scheduled, step);
  auto draws = draws_of(sampling, model_.config().vocab_size);
  auto plan = plan_rows(scheduled);
  plan.captured = plan.captured && !copies;
  if (shares_experts(model_)) agree(plan);
  write_inputs(scheduled, step, draws, plan);
  require(before != nullptr || std::ranges::none_of(scheduled, takes_unknown), ErrorKind::kBug,
          "a token of no step is not known");
  inputs_.upload(before != nullptr ? before->tokens : at::Tensor());
  cache.copy_states(inputs_.on_device(begun_states_));
  const auto [hidden, routes] =
      plan.captured ? replay(plan, cache) : forward(make_step(scheduled, plan, copies), cache);
  cache.copy_states(inputs_.on_device(kept_states_));
  draw(sampling, draws, hidden, step);
  step.prompts = score_prompts(
      scheduled, hidden, {.vocab_size = model_.config().vocab_size, .max_rows = max_num_seqs_},
      [&](const at::Tensor& rows) { return model_.whole_output(rows).contiguous(); });
  for (auto& prompt : step.prompts)
    for (auto* const numbers : prompt.tensors()) *numbers = begin_download(*numbers);
  if (routes.defined()) keep_routes(scheduled, routes, step);
  if (hidden.is_cuda()) {
    step.done = std::make_shared<c10::Event>(c10::DeviceType::CUDA);
    step.done->record(
        c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(hidden.device()));
    if (plan.captured) {
      const auto& mesh = model_.mesh();
      (mesh.tp().size() > mesh.ep().size() ? mesh.tp() : mesh.ep())
          .watch("decoding", [done = step.done] { return done->query(); });
    }
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
  if (step.results.entropies.defined()) {
    const auto* const entropies = step.results.entropies.const_data_ptr<float>();
    for (std::size_t i = 0; i < step.drawn.size(); ++i) step.drawn[i].token.entropy = entropies[i];
  }
  if (step.results.sampling_mask.defined()) add_masks(step.drawn, step.results.sampling_mask);
  if (step.results.top_tokens.defined()) add_top(step.drawn, step.results);
}

bool ModelRunner::sees_images(const models::GPTModel& model) {
  return model.config().vision.has_value();
}

void ModelRunner::forget_graphs() {
  graphs_.reset();
}

// Lists the rows that tokens are drawn from.
std::vector<SamplingRow> ModelRunner::begin_draws(std::span<const ScheduledSequence> scheduled,
                                                  StepInFlight& step) {
  std::vector<SamplingRow> sampling;
  std::int64_t row = 0;
  for (const auto& [sequence, num_new_tokens] : scheduled) {
    row += num_new_tokens;
    if (sequence->num_computed_tokens + num_new_tokens < sequence->size()) continue;
    step.drawn.push_back({.sequence = sequence, .row = row - 1, .position = sequence->size()});
    sampling.push_back({.params = sequence->params.get(),
                        .seed = sequence->seed,
                        .request = sequence->random_stream,
                        .position = sequence->size(),
                        .prompt = sequence->prompt(),
                        .output = sequence->output(),
                        .forbidden = sequence->forbidden(),
                        .constraint = sequence->constraint.get()});
  }
  return sampling;
}

// This rank's rows, which agree() may raise.
ModelRunner::RowPlan ModelRunner::plan_rows(std::span<const ScheduledSequence> scheduled) const {
  RowPlan plan{.captured = captures_graphs_};
  for (const auto& one : scheduled) {
    plan.rows += one.num_new_tokens;
    plan.captured = plan.captured && one.decodes();
  }
  plan.rows = std::max<std::int64_t>(plan.rows, 1);
  return plan;
}

// Ranks that share experts have as many rows as the one with the most, unless those are many.
void ModelRunner::agree(RowPlan& plan) const {
  const auto& mesh = model_.mesh();
  auto most = at::empty({2}, at::kLong);
  most.mutable_data_ptr<std::int64_t>()[0] = plan.rows;
  most.mutable_data_ptr<std::int64_t>()[1] = plan.captured ? 0 : 1;
  most = mesh.all().all_reduce_max(most.to(mesh.world().device())).cpu();
  const auto rows = most.const_data_ptr<std::int64_t>()[0];
  plan.captured = most.const_data_ptr<std::int64_t>()[1] == 0;
  plan.equal = rows <= kMostEqualRows;
  plan.captured = plan.captured && plan.equal;
  if (plan.equal) plan.rows = rows;
}

// The inputs of the forward pass come first: in a graph their addresses depend on the number of
// rows alone.
void ModelRunner::write_inputs(std::span<const ScheduledSequence> scheduled,
                               const StepInFlight& step,
                               const Draws& draws,
                               const RowPlan& plan) {
  const auto count = static_cast<std::int64_t>(scheduled.size());
  const auto rows = distckpt::round_up(
      plan.captured ? DecodeGraphs::bucket_of(plan.rows) : plan.rows, rows_multiple_);
  const auto sequences = plan.captured ? rows : count;
  inputs_.begin();
  tokens_ = inputs_.add({rows}, at::kLong);
  // Rows behind a prompt have one position in all axes.
  const auto sees = [](const auto& one) { return one.sequence->visual != nullptr; };
  const bool has_axes = !plan.captured && std::ranges::any_of(scheduled, sees);
  positions_ = has_axes ? inputs_.add({kAxes, rows}, at::kLong) : inputs_.add({rows}, at::kLong);
  const auto groups = static_cast<std::int64_t>(num_groups_);
  slots_ = inputs_.add({groups, rows}, at::kLong);
  lengths_ = inputs_.add({sequences}, at::kInt);
  block_tables_ = inputs_.add({groups, sequences, max_blocks_}, at::kInt);
  fill_rows(scheduled);
  fill_blocks(scheduled);
  if (model_.config().has_linear_attention()) fill_linear_rows(scheduled, plan, rows);

  const auto& copies = step.copies;
  const auto write = [](const std::vector<CopiedSlot>& copied, std::int64_t* slot) {
    slot = std::ranges::transform(copied, slot, &CopiedSlot::from).out;
    return std::ranges::transform(copied, slot, &CopiedSlot::to).out;
  };
  copied_slots_ = inputs_.add({groups, 2, std::ssize(copies.keys.front())}, at::kLong);
  auto* slot = copied_slots_.data<std::int64_t>();
  for (const auto& copied : copies.keys) slot = write(copied, slot);
  begun_states_ = inputs_.add({2, std::ssize(copies.begun_states)}, at::kLong);
  write(copies.begun_states, begun_states_.data<std::int64_t>());
  kept_states_ = inputs_.add({2, std::ssize(copies.kept_states)}, at::kLong);
  write(copies.kept_states, kept_states_.data<std::int64_t>());

  last_rows_ = inputs_.add({std::ssize(step.drawn)}, at::kLong);
  std::ranges::transform(step.drawn, last_rows_.data<std::int64_t>(), &DrawnToken::row);

  const auto bytes = static_cast<std::int64_t>(draws.plain.size() * sizeof(DrawRow));
  plain_draws_ = inputs_.add({bytes}, at::kByte);
  std::ranges::copy(draws.plain, plain_draws_.data<DrawRow>());
}

void ModelRunner::fill_rows(std::span<const ScheduledSequence> scheduled) {
  auto* const tokens = tokens_.data<std::int64_t>();
  auto* const positions = positions_.data<std::int64_t>();
  auto* const lengths = lengths_.data<std::int32_t>();
  const auto num_rows = tokens_.sizes[0];
  const auto axes = positions_.sizes.size() == 2 ? kAxes : 1;
  VisualStep visual;
  std::int64_t row = 0;
  std::int64_t index = 0;
  for (const auto& [sequence, num_new_tokens] : scheduled) {
    const auto begin = sequence->num_computed_tokens;
    const auto* const images = sequence->visual.get();
    if (images != nullptr) visual.add(*images, *vision_, begin, num_new_tokens, row);
    for (auto position = begin; position < begin + num_new_tokens; ++position, ++row) {
      const auto token = sequence->token_ids[static_cast<std::size_t>(position)];
      tokens[row] = token == Sequence::kUnknown ? -1 - sequence->drawn_at : token;
      for (std::int64_t axis = 0; axis < axes; ++axis)
        positions[axis * num_rows + row] =
            images == nullptr ? position
                              : images->position(static_cast<std::size_t>(axis), position);
    }
    lengths[index++] = static_cast<std::int32_t>(begin + num_new_tokens);
  }
  visual_ = visual.rows();
  for (; row < num_rows; ++row) {
    tokens[row] = 0;
    for (std::int64_t axis = 0; axis < axes; ++axis) positions[axis * num_rows + row] = 0;
  }
  for (const auto sequences = lengths_.sizes[0]; index < sequences; ++index) lengths[index] = 0;
}

// The slots of the rows and the tables of the sequences, in each group.
void ModelRunner::fill_blocks(std::span<const ScheduledSequence> scheduled) {
  auto* slot = slots_.data<std::int64_t>();
  auto* entry = block_tables_.data<std::int32_t>();
  for (std::size_t group = 0; group < num_groups_; ++group) {
    auto* const end_of_slots = slot + tokens_.sizes[0];
    auto* const end_of_tables = entry + lengths_.sizes[0] * max_blocks_;
    for (const auto& [sequence, num_new_tokens] : scheduled) {
      const auto& table = sequence->block_tables[group];
      const auto begin = sequence->num_computed_tokens;
      for (auto position = begin; position < begin + num_new_tokens; ++position)
        *slot++ =
            table[static_cast<std::size_t>(position / KVCache::kBlockSize)] * KVCache::kBlockSize +
            position % KVCache::kBlockSize;
      const auto end =
          std::ranges::replace_copy(table, entry, Sequence::kNoBlock, unseen_block_).out;
      std::fill(end, entry += max_blocks_, 0);
    }
    slot = std::fill_n(slot, end_of_slots - slot, -1);
    entry = std::fill_n(entry, end_of_tables - entry, 0);
  }
}

// In a graph every row decodes, those behind the sequences in the cache's additional slot.
void ModelRunner::fill_linear_rows(std::span<const ScheduledSequence> scheduled,
                                   const RowPlan& plan,
                                   std::int64_t rows) {
  linear_ = {};
  std::int64_t row = 0;
  for (const auto& one : scheduled) {
    const auto& [sequence, num_new_tokens] = one;
    (one.decodes() ? linear_.decodes : linear_.chunks)
        .push_back({.row_begin = row,
                    .num_rows = num_new_tokens,
                    .num_computed = sequence->num_computed_tokens,
                    .slot = sequence->state_slot});
    row += num_new_tokens;
  }
  for (; plan.captured && row < rows; ++row)
    linear_.decodes.push_back({.row_begin = row, .num_rows = 1, .slot = unread_slot_});
  const auto count = static_cast<std::int64_t>(linear_.decodes.size());
  linear_rows_ = inputs_.add({count}, at::kLong);
  linear_slots_ = inputs_.add({count}, at::kLong);
  std::ranges::transform(linear_.decodes, linear_rows_.data<std::int64_t>(),
                         &models::SequenceRows::row_begin);
  std::ranges::transform(linear_.decodes, linear_slots_.data<std::int64_t>(),
                         &models::SequenceRows::slot);
}

models::LinearRows ModelRunner::linear_rows() const {
  auto rows = linear_;
  rows.decode_rows = inputs_.on_device(linear_rows_);
  rows.decode_slots = inputs_.on_device(linear_slots_);
  return rows;
}

// Padding rows are last.
DecodedRows ModelRunner::forward(const PagedStep& step, KVCache& cache) const {
  StepRoutes routes(model_);
  const bool keeps = enable_return_routed_experts_;
  PagedContext context(cache, step);
  DecodedRows rows{
      .hidden = model_.forward(inputs_.on_device(tokens_), inputs_.on_device(positions_), context,
                               keeps ? routes.recording() : models::RouterReplay{}, visual_)};
  if (keeps) rows.routes = routes.gather();
  return rows;
}

// The same for a step whose rows all decode.
DecodedRows ModelRunner::replay(const RowPlan& plan, KVCache& cache) {
  if (!graphs_) {
    graphs_.emplace([this, &cache, equal = plan.equal](std::int64_t) {
      PagedStep step{.groups = groups_of_step(),
                     .lengths = inputs_.on_device(lengths_),
                     .num_decodes = tokens_.sizes[0],
                     .equal_rows = equal};
      if (model_.config().has_linear_attention()) step.linear = linear_rows();
      return forward(step, cache);
    });
  }
  return graphs_->replay(tokens_.sizes[0]);
}

std::vector<PagedGroup> ModelRunner::groups_of_step() const {
  const auto slots = inputs_.on_device(slots_);
  const auto tables = inputs_.on_device(block_tables_);
  std::vector<PagedGroup> groups;
  for (std::int64_t group = 0; group < slots.size(0); ++group)
    groups.push_back({.slots = slots[group], .block_tables = tables[group]});
  return groups;
}

PagedStep ModelRunner::make_step(std::span<const ScheduledSequence> scheduled,
                                 const RowPlan& plan,
                                 bool copies) const {
  std::size_t widest = 0;
  PagedStep step{.groups = groups_of_step(),
                 .lengths = inputs_.on_device(lengths_),
                 .max_gathered_keys = max_gathered_keys_,
                 .equal_rows = plan.equal};
  const auto tables = inputs_.on_device(block_tables_);
  std::int64_t row = 0;
  for (std::size_t i = 0; i < scheduled.size(); ++i) {
    const auto& [sequence, num_new_tokens] = scheduled[i];
    step.chunks.push_back({.row_begin = row,
                           .num_rows = num_new_tokens,
                           .num_keys = sequence->num_computed_tokens + num_new_tokens,
                           .blocks = tables.select(1, static_cast<std::int64_t>(i))});
    row += num_new_tokens;
    if (!scheduled[i].decodes()) continue;
    ++step.num_decodes;
    widest = std::max(widest, sequence->block_tables.front().size());
  }
  step.lengths = step.lengths.narrow(0, 0, step.num_decodes);
  const auto copied = inputs_.on_device(copied_slots_);
  for (std::size_t i = 0; i < step.groups.size(); ++i) {
    auto& group = step.groups[i];
    group.block_tables = group.block_tables.narrow(0, 0, step.num_decodes)
                             .narrow(1, 0, static_cast<std::int64_t>(widest));
    if (copies) group.copied_slots = copied[static_cast<std::int64_t>(i)];
  }
  if (model_.config().has_linear_attention()) step.linear = linear_rows();
  return step;
}

void ModelRunner::draw(std::span<const SamplingRow> sampling,
                       Draws& draws,
                       const at::Tensor& hidden,
                       StepInFlight& step) {
  if (step.drawn.empty()) return;
  // Rows ascend: if the last one's index is their number less one, they are the first rows.
  const auto count = static_cast<std::int64_t>(step.drawn.size());
  const auto rows = step.drawn.back().row + 1 == count
                        ? hidden.narrow(0, 0, count)
                        : hidden.index_select(0, inputs_.on_device(last_rows_));
  const auto logits = model_.whole_output(rows).contiguous();
  if (logits.is_cuda()) draws.plain_on_gpu = inputs_.on_device(plain_draws_);
  const auto sampled = sample(logits, model_.config().vocab_size, sampling, draws);
  step.tokens = sampled.tokens;
  step.results = {.tokens = sampled.tokens,
                  .logprobs = sampled.logprobs,
                  .processed_logprobs = sampled.processed_logprobs,
                  .entropies = begin_download(sampled.entropies),
                  .sampling_mask = sampled.sampling_mask,
                  .top_tokens = begin_download(sampled.top_tokens),
                  .top_logprobs = begin_download(sampled.top_logprobs)};
  auto& ids = step.results.sampling_mask.token_ids;
  if (ids.defined()) ids = begin_download(ids.to(at::kInt));
  if (!logits.is_cuda()) return;
  const auto& host = results_[results_side_ = 1 - results_side_];
  download_step({.tokens = sampled.tokens,
                 .logprobs = sampled.logprobs,
                 .processed_logprobs = sampled.processed_logprobs},
                host);
  step.results.tokens = host.tokens;
  step.results.logprobs = host.logprobs;
  step.results.processed_logprobs = host.processed_logprobs;
}

// Keeps the routes of all rows but padding.
void ModelRunner::keep_routes(std::span<const ScheduledSequence> scheduled,
                              const at::Tensor& routes,
                              StepInFlight& step) const {
  std::int64_t rows = 0;
  for (const auto& one : scheduled) rows += one.num_new_tokens;
  const auto* const slots = slots_.data<std::int64_t>();
  step.slots.assign(slots, slots + rows);
  step.routed_experts = begin_download(routes.narrow(0, 0, rows));
  for (auto& drawn : step.drawn) drawn.block_table = drawn.sequence->block_tables.front();
}

}  // namespace ferry::rollout
