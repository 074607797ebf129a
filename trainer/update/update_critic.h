// One update of the critic from a mini-batch (verl's update_critic): the loss of the value of every
// token of the responses, through all stages of the pipeline and back. Gradients and metrics do not
// depend on the cut into micro-batches, but for fp32's rounding.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "trainer/algorithms/ppo_loss.h"
#include "trainer/engine/pipeline/pipeline_schedule.h"
#include "trainer/engine/seqlen_balancing.h"
#include "trainer/engine/visual_inputs.h"
#include "trainer/update/rollout_batch.h"

namespace ferry::trainer {

struct CriticUpdate {
  CriticLossConfig loss{};
  double loss_scale_factor = 0;  // of seq-mean-token-sum-norm
  VisualInputs visual{};         // of the batch's rows
};

// Called as update_actor() is, on a model that compute_values() takes. Reads response_mask, values
// and returns; the value of a response's token is what compute_values() gives at the token before
// it (verl: values[:, -R-1:-1]). Returns critic/vf_loss, critic/vf_clipfrac and critic/vpred_mean.
// Throws Error(kUsage) for a row without a prompt or a response, and for another model.
std::map<std::string, double> update_critic(const Pipeline& pipeline,
                                            const RolloutBatch& batch,
                                            const std::vector<Partition>& parts,
                                            const CriticUpdate& update,
                                            double grad_scale = 1);

}  // namespace ferry::trainer
