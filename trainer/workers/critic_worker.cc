#include "trainer/workers/critic_worker.h"

#include <utility>

#include "trainer/update/compute_values.h"
#include "trainer/update/update_critic.h"
#include "trainer/workers/role.h"

namespace ferry::trainer {

CriticWorker::CriticWorker(models::World& world,
                           const PpoConfig& config,
                           std::shared_ptr<const converter::Checkpoint> origin,
                           std::int64_t total_steps)
    : MegatronWorker(world,
                     role_engine({.role = Role::kCritic,
                                  .origin = std::move(origin),
                                  .model = config.critic.model.path.empty() ? config.model
                                                                            : config.critic.model,
                                  .engine = config.critic.megatron,
                                  .ranks = config.critic.ranks,
                                  .value_head = true},
                                 config,
                                 config.critic.optim,
                                 total_steps),
                     offload_flags(config.critic.megatron)),
      config_(config) {}

RolloutBatch CriticWorker::compute_values(const RolloutBatch& batch) {
  const Awake awake(*this, {.param = true});
  auto answer = batch.without_columns();
  answer.values = batch.responses_of(trainer::compute_values(
      engine().pipeline(/*forward_only=*/true), batch.sequences(),
      padded_micro_batches(batch, config_.critic_micro_batches(), config_.longest_sequence()),
      visual_inputs(batch)));
  return answer;
}

UpdateOutput CriticWorker::update_critic(const RolloutBatch& batch) {
  const auto aggregation = config_.critic_loss_aggregation();
  CriticUpdate options{.loss = {.cliprange_value = config_.critic.cliprange_value,
                                .loss_agg_mode = aggregation.loss_agg_mode},
                       .loss_scale_factor = aggregation.loss_scale_factor};
  return update(
      batch, config_.critic_mini_batches(), [&](const RolloutBatch& mini_batch, double grad_scale) {
        options.visual = visual_inputs(mini_batch);
        return trainer::update_critic(
            engine().pipeline(), mini_batch,
            micro_batches(mini_batch, config_.critic_micro_batches(), config_.longest_sequence()),
            options, grad_scale);
      });
}

}  // namespace ferry::trainer
