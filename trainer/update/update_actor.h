// One update of the policy from a mini-batch of answered prompts (verl's update_policy): the loss
// of every token of the answers, put together as the configuration says, through all stages of the
// pipeline and back. Gradients and metrics do not depend on the cut into micro-batches, but for
// fp32's rounding.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "trainer/algorithms/ppo_loss.h"
#include "trainer/engine/pipeline/pipeline_schedule.h"
#include "trainer/engine/seqlen_balancing.h"
#include "trainer/optimizer/distributed_optimizer.h"

namespace ferry::trainer {

// A prompt and its answer, of R tokens. Tensors are [R], fp32, on the host.
struct ActorSample {
  at::Tensor tokens{};  // [prompt + R], int64
  std::int64_t num_prompt_tokens = 0;
  at::Tensor response_mask{};  // [R], int64; undefined: every token counts
  at::Tensor old_log_prob{};
  at::Tensor advantages{};
  at::Tensor ref_log_prob{};             // with use_kl_loss
  at::Tensor rollout_is_weights{};       // undefined: none
  at::Tensor cov_tokens{};               // bool, of select_cov_tokens(): clip_cov and kl_cov
  at::Tensor routed_experts{};           // [prompt + R, layers, topk], of all samples, or undefined
  models::SamplingMask sampling_mask{};  // as of AnsweredPrompt

  std::int64_t num_response_tokens() const { return tokens.size(0) - num_prompt_tokens; }
};

struct ActorUpdate {
  ActorLossConfig loss{};
  double temperature = 1;        // that the answers were drawn at
  double loss_scale_factor = 0;  // of seq-mean-token-sum-norm
};

// Called by all ranks of the mesh, with the samples of their data parallel rank and the parts of
// each micro-batch. The gradients are for DistributedOptimizer::step() to take; returns the metrics
// of the whole mini-batch, on all ranks: none, and no gradients, if no token of it counts.
// `grad_scale`: DistributedOptimizer::loss_scale(). Throws Error(kUsage) for a sample without
// prompt or answer.
std::map<std::string, double> update_actor(const Pipeline& pipeline,
                                           const std::vector<ActorSample>& samples,
                                           const std::vector<Partition>& parts,
                                           const ActorUpdate& update,
                                           double grad_scale = 1);

}  // namespace ferry::trainer
