#include "trainer/engine/router_replay.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "distckpt/base/error.h"
#include "models/distributed/world.h"
#include "rollout/routed_experts.h"

namespace ferry::trainer {
namespace {

using rollout::layers_with_experts;

// Between ranks: no collective knows numbers of two bytes.
at::ScalarType wire_type(const models::TransformerConfig& config) {
  const auto type = models::routed_experts_type(config.num_moe_experts);
  return type == at::kShort ? at::kInt : type;
}

}  // namespace

RouteRecorder::RouteRecorder(const Pipeline& pipeline,
                             std::span<const models::SequencePartition> batches)
    : pipeline_(pipeline), batches_(batches), chosen_(batches.size()) {
  require(!layers_with_experts(pipeline.config()).empty(), ErrorKind::kUsage,
          "router_replay: the model has no experts");
}

RouteFunction RouteRecorder::routes() {
  return [this](std::size_t, std::size_t micro_batch) {
    return models::RouterReplay{
        .record = [this, micro_batch](std::int64_t layer, const at::Tensor& experts) {
          chosen_[micro_batch][layer] = experts.to(wire_type(pipeline_.config()));
        }};
  };
}

// [tokens of the pack, topk], of a layer of this stage.
at::Tensor RouteRecorder::whole(std::size_t micro_batch, std::int64_t layer) const {
  const auto& mesh = pipeline_.chunks.front()->mesh();
  const auto& batch = batches_[micro_batch];
  const auto local = mesh.tp().all_gather(chosen_[micro_batch].at(layer));
  return batch.in_pack_order(mesh.cp().all_gather(local)).narrow(0, 0, batch.num_tokens());
}

at::Tensor RouteRecorder::collect() const {
  const auto& config = pipeline_.config();
  const auto& mesh = pipeline_.chunks.front()->mesh();
  const auto layers = layers_with_experts(config);
  const auto options = at::TensorOptions().dtype(wire_type(config)).device(mesh.world().device());
  std::vector<at::Tensor> packs;
  for (std::size_t i = 0; i < batches_.size(); ++i) {
    auto pack = at::zeros({batches_[i].num_tokens(), static_cast<std::int64_t>(layers.size()),
                           config.moe_router_topk},
                          options);
    for (std::size_t column = 0; column < layers.size(); ++column) {
      if (chosen_[i].contains(layers[column]))
        pack.select(1, static_cast<std::int64_t>(column)).copy_(whole(i, layers[column]));
    }
    packs.push_back(pack);
  }
  // Each layer is of one stage; elsewhere there are zeros.
  const auto all = mesh.pp().all_reduce_max(at::cat(packs)).cpu();
  return all.to(models::routed_experts_type(config.num_moe_experts));
}

RouteFunction replay_routes(const Pipeline& pipeline,
                            std::span<const models::SequencePartition> batches,
                            const std::vector<Partition>& parts,
                            const std::vector<at::Tensor>& of_sequences) {
  const auto layers = layers_with_experts(pipeline.config());
  const auto topk = pipeline.config().moe_router_topk;
  std::vector<at::Tensor> packs;
  for (const auto& part : parts) {
    std::vector<at::Tensor> rows;
    for (const auto i : part) rows.push_back(of_sequences[i]);
    packs.push_back(at::cat(rows));
    require(packs.back().size(1) == static_cast<std::int64_t>(layers.size()) &&
                packs.back().size(2) == topk,
            ErrorKind::kUsage,
            "routed_experts: {} layers of {} choices, the model has {} layers with experts, of {}",
            packs.back().size(1), packs.back().size(2), layers.size(), topk);
  }
  return [&pipeline, batches, layers, packs = std::move(packs)](std::size_t chunk,
                                                                std::size_t micro_batch) {
    const auto& model = *pipeline.chunks[chunk];
    const auto& tp = model.mesh().tp();
    // One more than the expert: what fills a pack up, zeros, is then no expert's.
    const auto local = batches[micro_batch].local(packs[micro_batch].to(at::kShort) + 1);
    const auto rows = local.size(0) / tp.size();
    const auto mine = local.narrow(0, tp.rank() * rows, rows).to(at::kLong) - 1;
    models::RouterReplay replay;
    for (const auto layer : model.stage().layers) {
      const auto found = std::ranges::find(layers, layer);
      if (found != layers.end())
        replay.experts[layer] = mine.select(1, found - layers.begin()).contiguous();
    }
    return replay;
  };
}

}  // namespace ferry::trainer
