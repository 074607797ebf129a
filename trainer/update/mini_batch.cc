#include "trainer/update/mini_batch.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "distckpt/base/error.h"
#include "models/distributed/messages.h"
#include "models/distributed/world.h"
#include "models/tensor_parallel/mappings.h"
#include "trainer/engine/micro_batches.h"
#include "trainer/engine/router_replay.h"

namespace ferry::trainer {
std::vector<at::Tensor> scored_of(const RolloutBatch& batch) {
  std::vector<at::Tensor> scored;
  for (std::int64_t row = 0; row < batch.size(); ++row) {
    scored.push_back(at::zeros({batch.length(row)}, at::kBool));
    scored.back().narrow(0, batch.prompt_length(row) - 1, batch.response_length(row)).fill_(true);
  }
  return scored;
}

std::vector<models::SamplingMask> sampling_masks_of(const RolloutBatch& batch) {
  std::vector<models::SamplingMask> masks;
  if (!batch.sampling_mask.defined()) return masks;
  for (std::int64_t row = 0; row < batch.size(); ++row) {
    const auto mask = batch.sampling_mask.rows(
        batch.response_offsets[static_cast<std::size_t>(row)], batch.response_length(row));
    models::SamplingMask places{.token_ids = mask.token_ids};
    places.offsets.assign(static_cast<std::size_t>(batch.prompt_length(row) - 1), 0);
    places.offsets.insert(places.offsets.end(), mask.offsets.begin(), mask.offsets.end());
    places.offsets.push_back(mask.offsets.back());
    masks.push_back(std::move(places));
  }
  return masks;
}

std::vector<at::Tensor> rows_of(const RolloutBatch& batch, const at::Tensor& of_tokens) {
  if (!of_tokens.defined()) return {};
  return of_tokens.split_with_sizes(batch.lengths());
}

MiniBatch::MiniBatch(const RolloutBatch& batch,
                     std::vector<Partition> parts,
                     const models::ParallelState& mesh,
                     VisualInputs visual)
    : batch_(batch), parts_(std::move(parts)), mesh_(mesh), visual_(std::move(visual)) {
  for (std::int64_t row = 0; row < batch.size(); ++row)
    require(batch.prompt_length(row) > 0 && batch.response_length(row) > 0, ErrorKind::kUsage,
            "a row of {} tokens, {} of the prompt: it takes one of each at least",
            batch.length(row), batch.prompt_length(row));
  const auto tokens = batch.response_mask.sum().item<std::int64_t>();
  const auto mine = at::tensor({tokens, batch.size()}, at::kLong);
  const auto counts = mesh.dp().all_reduce(mine.to(mesh.world().device())).cpu();
  batch_num_tokens_ = counts[0].item<std::int64_t>();
  global_batch_size_ = counts[1].item<std::int64_t>();
  packs_ = pack_micro_batches(batch.sequences(), parts_, mesh, scored_of(batch),
                              sampling_masks_of(batch), visual_.sequences);
}

GlobalBatchInfo MiniBatch::info(double loss_scale_factor) const {
  return {.batch_num_tokens = batch_num_tokens_,
          .global_batch_size = global_batch_size_,
          .loss_scale_factor = loss_scale_factor};
}

at::Tensor MiniBatch::pad(const std::vector<at::Tensor>& rows) const {
  const auto longest =
      std::ranges::max(rows, {}, [](const auto& row) { return row.size(0); }).size(0);
  std::vector<at::Tensor> padded;
  for (const auto& row : rows)
    padded.push_back(at::constant_pad_nd(row, {0, longest - row.size(0)}));
  return at::stack(padded).to(mesh_.world().device());  // a copy waits for the device: one does
}

at::Tensor MiniBatch::of_pack(std::size_t i, const at::Tensor& local) const {
  const auto tokens = packs_[i].in_pack_order(
      models::gather_from_sequence_parallel_region(local, mesh_.cp(), /*replicated=*/true));
  std::vector<at::Tensor> rows;
  std::int64_t begin = 0;
  for (const auto index : parts_[i]) {
    const auto row = static_cast<std::int64_t>(index);
    rows.push_back(
        tokens.narrow(0, begin + batch_.prompt_length(row) - 1, batch_.response_length(row)));
    begin += batch_.length(row);
  }
  return pad(rows);
}

at::Tensor MiniBatch::of_column(std::size_t i, const at::Tensor& column) const {
  if (!column.defined()) return {};
  std::vector<at::Tensor> rows;
  for (const auto row : parts_[i])
    rows.push_back(batch_.response_of(column, static_cast<std::int64_t>(row)));
  return pad(rows);
}

std::map<std::string, double> MiniBatch::run(const Pipeline& pipeline,
                                             const LossFunction& loss,
                                             double grad_scale) const {
  ForwardBackwardOptions options{
      .grad_scale = grad_scale,
      .visual = visual_function(visual_, pipeline.chunks, packs_, parts_)};
  if (batch_.routed_experts.defined())
    options.routes =
        replay_routes(pipeline, packs_, parts_, rows_of(batch_, batch_.routed_experts));
  const auto of_packs = forward_backward(pipeline, packs_, loss, options);
  std::map<std::string, double> mine;
  for (const auto& metrics : of_packs)
    for (const auto& [name, value] : metrics) mine[name] += value.item<double>();
  // The last stage knows them; all data parallel ranks have their shares.
  auto metrics = models::broadcast(mesh_.pp(), mine, mesh_.pp().size() - 1);
  std::vector<double> shares;
  for (const auto& [name, share] : metrics) shares.push_back(share);
  const auto sums =
      mesh_.dp().all_reduce(at::tensor(shares, at::kDouble).to(mesh_.world().device())).cpu();
  std::int64_t i = 0;
  for (auto& [name, sum] : metrics) sum = sums[i++].item<double>();
  return metrics;
}

}  // namespace ferry::trainer
