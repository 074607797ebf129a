// The balance of experts in training (Megatron-Core transformer/moe/router.py and moe_utils.py):
// auxiliary losses, the update of the routers' biases, and the load that both are to even out.
//
// The losses have Megatron-Core's values. They count tokens of sequences alone, not what fills a
// pack up, once each, whatever is recomputed, and only in passes that are learned from. Their
// gradients are those of a mean over the global batch: a micro-batch weighs as much as it has
// tokens, and in the loss of sequences every sequence weighs the same. With micro-batches of one
// size that is Megatron-Core's scale, 1 / (micro-batches x data parallel ranks), of both of its
// normalisations. (Of global_aux_loss it divides by the data parallel ranks twice, so that its
// gradient is that of the loss it logs on one such rank alone.)
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "models/gpt_model.h"
#include "models/transformer/packed_sequences.h"
#include "models/transformer/router.h"

namespace ferry::trainer {

// Coefficients; 0: the loss is not computed.
struct LoadBalancingConfig {
  double aux_loss_coeff = 0;         // of the tokens of a micro-batch
  double seq_aux_loss_coeff = 0;     // of the tokens of each sequence
  double global_aux_loss_coeff = 0;  // of the micro-batches of a step so far, of all ranks
  double z_loss_coeff = 0;
  double bias_update_rate = 0;  // moe_router_bias_update_rate

  bool has_losses() const {
    return aux_loss_coeff > 0 || seq_aux_loss_coeff > 0 || global_aux_loss_coeff > 0 ||
           z_loss_coeff > 0;
  }
  bool operator==(const LoadBalancingConfig&) const = default;
};

// The biases [..., experts], moved by `update_rate` towards equal loads (DeepSeek-V3,
// section 2.1.2; Megatron-Core moe_utils.py); tokens_per_expert [..., experts], of the whole step.
at::Tensor get_updated_expert_bias(const at::Tensor& tokens_per_expert,
                                   const at::Tensor& expert_bias,
                                   double update_rate);

class LoadBalancing {
 public:
  // The model has experts. The mesh must outlive it.
  LoadBalancing(const models::TransformerConfig& config,
                const models::ParallelState& mesh,
                const LoadBalancingConfig& balancing);

  // Called by all ranks of the mesh before the passes of a batch, which outlives them. Data
  // parallel ranks have the same number of micro-batches. `grad_scale`: of the main loss.
  void begin(std::span<const models::SequencePartition> batches, double grad_scale);
  // The hook of the routers in the passes of a micro-batch. It is run by all ranks of a stage, in
  // the same order of layers and micro-batches.
  models::RoutingHook hook(std::size_t micro_batch);

  // Called by all ranks of the mesh behind the passes of a step: returns the metrics, sets all
  // counts back, and updates the biases of `chunks` if `updates`.
  std::map<std::string, double> finish(const std::vector<models::GPTModel*>& chunks, bool updates);

 private:
  struct MicroBatch {
    at::Tensor sequences{};          // [rows of a router], int64: of each its sequence
    at::Tensor is_token{};           // [rows], int64: 0 where a pack is filled up
    at::Tensor lengths{};            // [sequences], fp32
    std::int64_t tokens = 0;         // on the ranks of this pipeline
    std::int64_t tokens_of_all = 0;  // on all data parallel ranks
  };
  // The sums of one layer over the micro-batches of a step.
  struct Layer {
    at::Tensor tokens_per_expert{};  // [experts], int64, of this rank, of the experts that computed
    at::Tensor losses{};             // [kinds], fp64, of this rank
    at::Tensor global_tokens_per_expert{};  // [experts], int64, of all ranks, of the best scores
    std::int64_t global_tokens = 0;
  };

  at::Tensor balance(std::size_t micro_batch, std::int64_t layer, const models::Routing& routing);
  at::Tensor gradient(const MicroBatch& batch, Layer& layer, const at::Tensor& logits);

  models::TransformerConfig config_;
  const models::ParallelState& mesh_;
  LoadBalancingConfig balancing_;
  std::vector<std::int64_t> moe_layers_;  // of the whole model
  std::map<std::int64_t, Layer> layers_;  // of this rank
  std::vector<MicroBatch> batches_;
  double grad_scale_ = 1;
  std::int64_t tokens_of_batch_ = 0;     // of all ranks
  std::int64_t sequences_of_batch_ = 0;  // the same
  std::int64_t tokens_of_step_ = 0;      // of all batches since finish()
};

}  // namespace ferry::trainer
