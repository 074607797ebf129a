// One update of the critic from a mini-batch of answered prompts (verl's update_critic): the loss
// of the value of every token of the answers, through all stages of the pipeline and back.
// Gradients and metrics do not depend on the cut into micro-batches, but for fp32's rounding.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "trainer/algorithms/ppo_loss.h"
#include "trainer/engine/pipeline/pipeline_schedule.h"
#include "trainer/engine/seqlen_balancing.h"

namespace ferry::trainer {

// A prompt and its answer, of R tokens. Tensors are [R], fp32, on the host. The value of a token of
// the answer is what compute_values() gives at the token before it (verl: values[:, -R-1:-1]).
struct CriticSample {
  at::Tensor tokens{};  // [prompt + R], int64
  std::int64_t num_prompt_tokens = 0;
  at::Tensor response_mask{};  // [R], int64; undefined: every token counts
  at::Tensor values{};
  at::Tensor returns{};

  std::int64_t num_response_tokens() const { return tokens.size(0) - num_prompt_tokens; }
};

struct CriticUpdate {
  CriticLossConfig loss{};
  double loss_scale_factor = 0;  // of seq-mean-token-sum-norm
};

// Called as update_actor() is, on a model that compute_values() takes. Returns critic/vf_loss,
// critic/vf_clipfrac and critic/vpred_mean. Throws Error(kUsage) for a sample without prompt or
// answer, and for another model.
std::map<std::string, double> update_critic(const Pipeline& pipeline,
                                            const std::vector<CriticSample>& samples,
                                            const std::vector<Partition>& parts,
                                            const CriticUpdate& update,
                                            double grad_scale = 1);

}  // namespace ferry::trainer
