// One batch forwards and backwards through all stages of a pipeline, micro-batch by micro-batch
// (Megatron-Core forward_backward_func): rounds of passes and of what travels between stages
// (pipeline_order.h). What a stage receives it waits for when it needs it; what it has sent it
// keeps until it has arrived, and no longer.
//
// Losses are parts of the whole batch's, normalised by the caller's global count: gradients are
// their sums, whatever the cut into micro-batches.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "models/gpt_model.h"
#include "models/transformer/packed_sequences.h"
#include "trainer/algorithms/loss_output.h"
#include "trainer/engine/pipeline/load_balancing.h"
#include "trainer/engine/pipeline/p2p_communication.h"
#include "trainer/optimizer/distributed_data_parallel.h"

namespace ferry::trainer {

// On the last stage, of its normed hidden states [local tokens, hidden] of one micro-batch.
using LossFunction = std::function<LossOutput(
    const models::GPTModel& model, const at::Tensor& hidden, std::size_t micro_batch)>;

// Run what needs memory, and say what would fit where there is none; either may be empty.
struct MemoryGuards {
  using Body = std::function<void()>;
  // All passes of a batch.
  std::function<void(std::span<const models::SequencePartition>, bool forward_only, const Body&)>
      batch{};
  // The loss of a micro-batch, among these passes.
  std::function<void(const models::GPTModel&, const models::SequencePartition&, const Body&)>
      loss{};
};

struct Pipeline {
  std::vector<models::GPTModel*> chunks{};  // of this rank's stage, first to last
  const P2PCommunicator* p2p = nullptr;     // null: there is one stage
  DistributedDataParallel* ddp = nullptr;   // null: gradients are left with the parameters
  LoadBalancing* balancing = nullptr;       // of passes that are learned from; null: none
  MemoryGuards memory{};

  const models::TransformerConfig& config() const { return chunks.front()->config(); }
};

// The experts of the tokens in the pass of a micro-batch through a chunk of this stage.
using RouteFunction =
    std::function<models::RouterReplay(std::size_t chunk, std::size_t micro_batch)>;

// The rows of images in the same pass.
using VisualFunction =
    std::function<models::VisualRows(std::size_t chunk, std::size_t micro_batch)>;

struct ForwardBackwardOptions {
  bool forward_only = false;   // for log-probabilities and values: no graph is made
  double grad_scale = 1;       // of the loss: DistributedOptimizer::loss_scale()
  models::Observer observe{};  // of every forward pass; may be empty
  RouteFunction routes{};      // the same
  VisualFunction visual{};     // the same
};

// Called by all ranks of the mesh, with the same number of micro-batches, whose shapes every stage
// knows. Returns the metrics of each micro-batch on the last stage, elsewhere nothing.
std::vector<LossMetrics> forward_backward(const Pipeline& pipeline,
                                          std::span<const models::SequencePartition> batches,
                                          const LossFunction& loss,
                                          const ForwardBackwardOptions& options = {});

}  // namespace ferry::trainer
