#include "trainer/update/update_actor.h"

#include "trainer/update/mini_batch.h"

namespace ferry::trainer {

std::map<std::string, double> update_actor(const Pipeline& pipeline,
                                           const RolloutBatch& batch,
                                           const std::vector<Partition>& parts,
                                           const ActorUpdate& update,
                                           double grad_scale) {
  const MiniBatch mini_batch(batch, parts, pipeline.chunks.front()->mesh(), update.visual);
  if (mini_batch.teaches_nothing()) return {};
  const auto info = mini_batch.info(update.loss_scale_factor);
  const LossFunction loss = [&](const models::GPTModel& model, const at::Tensor& hidden,
                                std::size_t i) {
    const auto given = [&](const at::Tensor& column) { return mini_batch.of_column(i, column); };
    const auto& pack = mini_batch.pack(i);
    const auto result = model.log_probs(hidden, pack.tokens_behind(1), update.temperature,
                                        pack.scored(), pack.sampling_mask());
    ActorLossInputs inputs{
        .policy = PolicyLossInputs{.old_log_prob = given(batch.old_log_probs),
                                   .log_prob = mini_batch.of_pack(i, result.log_probs),
                                   .advantages = given(batch.advantages),
                                   .response_mask = given(batch.response_mask),
                                   .rollout_is_weights = given(batch.rollout_is_weights),
                                   .cov_tokens = given(update.cov_tokens)},
        .ref_log_prob = given(batch.ref_log_prob)};
    if (update.loss.entropy_coeff != 0) inputs.entropy = mini_batch.of_pack(i, result.entropy);
    return ppo_loss(inputs, update.loss, info);
  };
  return mini_batch.run(pipeline, loss, grad_scale);
}

}  // namespace ferry::trainer
