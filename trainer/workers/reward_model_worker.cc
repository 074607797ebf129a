#include "trainer/workers/reward_model_worker.h"

#include <utility>

#include "trainer/plan/run_setup.h"
#include "trainer/update/compute_values.h"
#include "trainer/workers/role.h"

namespace ferry::trainer {

RewardModelWorker::RewardModelWorker(models::World& world,
                                     const PpoConfig& config,
                                     std::shared_ptr<const converter::Checkpoint> origin)
    : MegatronWorker(world,
                     {.role = Role::kReward,
                      .origin = std::move(origin),
                      .model = config.reward.model,
                      .engine = config.reward.megatron,
                      .ranks = config.reward.ranks,
                      .memory = memory_settings(config, Role::kReward)},
                     offload_flags(config.reward.megatron)),
      config_(config) {}

RolloutBatch RewardModelWorker::compute_rm_score(const RolloutBatch& batch) {
  const Awake awake(*this, {.param = true});
  auto answer = batch.without_columns();
  answer.scores = trainer::compute_rm_score(
      engine().pipeline(/*forward_only=*/true), batch.sequences(),
      padded_micro_batches(batch, config_.reward_micro_batches(), config_.longest_sequence()),
      visual_inputs(batch));
  return answer;
}

}  // namespace ferry::trainer
