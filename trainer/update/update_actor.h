// One update of the policy from a mini-batch (verl's update_policy): the loss of every token of the
// responses, put together as the configuration says, through all stages of the pipeline and back.
// Gradients and metrics do not depend on the cut into micro-batches, but for fp32's rounding.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "trainer/algorithms/ppo_loss.h"
#include "trainer/engine/pipeline/pipeline_schedule.h"
#include "trainer/engine/seqlen_balancing.h"
#include "trainer/engine/visual_inputs.h"
#include "trainer/update/rollout_batch.h"

namespace ferry::trainer {

struct ActorUpdate {
  ActorLossConfig loss{};
  double temperature = 1;        // of the draws
  double loss_scale_factor = 0;  // of seq-mean-token-sum-norm
  at::Tensor cov_tokens{};       // [response tokens], bool, of select_cov_tokens()
  VisualInputs visual{};         // of the batch's rows
};

// Called by all ranks of the mesh, with the rows of their data parallel rank and the parts of each
// micro-batch. Reads response_mask, old_log_probs, advantages; ref_log_prob with use_kl_loss;
// rollout_is_weights, sampling_mask, routed_experts if they are known. Leaves the gradients for
// DistributedOptimizer::step(), whose loss_scale() is `grad_scale`. Returns the metrics of the
// whole mini-batch, on all ranks: none, and no gradients, if no token of it counts. Throws
// Error(kUsage) for a row without a prompt or a response.
std::map<std::string, double> update_actor(const Pipeline& pipeline,
                                           const RolloutBatch& batch,
                                           const std::vector<Partition>& parts,
                                           const ActorUpdate& update,
                                           double grad_scale = 1);

}  // namespace ferry::trainer
