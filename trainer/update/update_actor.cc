#include "trainer/update/update_actor.h"

#include "trainer/update/answer_batches.h"

namespace ferry::trainer {

std::map<std::string, double> update_actor(const Pipeline& pipeline,
                                           const std::vector<ActorSample>& samples,
                                           const std::vector<Partition>& parts,
                                           const ActorUpdate& update,
                                           double grad_scale) {
  const auto& mesh = pipeline.chunks.front()->mesh();
  const AnswerBatches batches(answered_prompts(samples), parts, mesh);
  if (batches.batch_num_tokens() == 0) return {};
  const GlobalBatchInfo info{.batch_num_tokens = batches.batch_num_tokens(),
                             .global_batch_size = batches.global_batch_size(),
                             .loss_scale_factor = update.loss_scale_factor};
  const LossFunction loss = [&](const models::GPTModel& model, const at::Tensor& hidden,
                                std::size_t i) {
    const auto given = [&](at::Tensor ActorSample::*one) { return batches.rows(i, samples, one); };
    const auto& pack = batches.pack(i);
    const auto result = model.log_probs(hidden, pack.tokens_behind(1), update.temperature,
                                        pack.scored(), pack.sampling_mask());
    ActorLossInputs inputs{.policy = {.log_prob = batches.rows(i, result.log_probs)},
                           .ref_log_prob = given(&ActorSample::ref_log_prob)};
    auto& policy = inputs.policy;
    policy.old_log_prob = given(&ActorSample::old_log_prob);
    policy.advantages = given(&ActorSample::advantages);
    policy.rollout_is_weights = given(&ActorSample::rollout_is_weights);
    policy.cov_tokens = given(&ActorSample::cov_tokens);
    policy.response_mask = batches.response_mask(i);
    if (update.loss.entropy_coeff != 0) inputs.entropy = batches.rows(i, result.entropy);
    return ppo_loss(inputs, update.loss, info);
  };
  std::vector<at::Tensor> routed_experts;
  for (const auto& sample : samples)
    if (sample.routed_experts.defined()) routed_experts.push_back(sample.routed_experts);
  return batches.run(pipeline, loss, grad_scale, routed_experts);
}

}  // namespace ferry::trainer
