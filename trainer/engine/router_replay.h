// The experts that the tokens of a batch went to, as they travel from the pass that recorded them
// to those that replay them (verl's router replay): of each sequence [tokens, layers with experts,
// topk], on the host, the layers of the whole model in its order; of models::routed_experts_type().
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "models/transformer/packed_sequences.h"
#include "trainer/engine/pipeline/pipeline_schedule.h"
#include "trainer/engine/seqlen_balancing.h"

namespace ferry::trainer {

// Records the experts that one batch of passes without gradients chooses. Pipeline and packs
// outlive it.
class RouteRecorder {
 public:
  // Throws Error(kUsage) for a model without experts.
  RouteRecorder(const Pipeline& pipeline, std::span<const models::SequencePartition> batches);

  RouteFunction routes();  // of the passes; this outlives it

  // Called by all ranks of the mesh, behind the passes: [tokens of all packs, ...], in the order of
  // the packs, the same on all ranks of a data parallel rank.
  at::Tensor collect() const;

 private:
  at::Tensor whole(std::size_t micro_batch, std::int64_t layer) const;

  const Pipeline& pipeline_;
  std::span<const models::SequencePartition> batches_;
  std::vector<std::map<std::int64_t, at::Tensor>> chosen_;  // of micro-batches, by layers
};

// Passes over the same packs whose tokens go where they went: `parts` of the sequences make a pack
// each. Where a sequence has negative numbers (its dtype is int16 then), and where packs are filled
// up, routers choose. The packs outlive it. Throws Error(kUsage) for experts of another model.
RouteFunction replay_routes(const Pipeline& pipeline,
                            std::span<const models::SequencePartition> batches,
                            const std::vector<Partition>& parts,
                            const std::vector<at::Tensor>& of_sequences);

}  // namespace ferry::trainer
