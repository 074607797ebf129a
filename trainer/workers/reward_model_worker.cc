#include "trainer/workers/reward_model_worker.h"

#include <utility>

#include "trainer/update/compute_values.h"
#include "trainer/workers/batch_rows.h"
#include "trainer/workers/role.h"

namespace ferry::trainer {

RewardModelWorker::RewardModelWorker(models::World& world,
                                     const PpoConfig& config,
                                     std::shared_ptr<const converter::Checkpoint> origin)
    : MegatronWorker(world,
                     {.name = "reward",
                      .origin = std::move(origin),
                      .model = config.reward.model,
                      .engine = config.reward.megatron,
                      .ranks = config.reward.ranks},
                     offload_flags(config.reward.megatron)),
      config_(config) {}

DataProto RewardModelWorker::compute_rm_score(const DataProto& batch) {
  const Awake awake(*this, {.param = true});
  const auto answers = answered_prompts_of(batch);
  const auto scores = trainer::compute_rm_score(
      engine().pipeline(/*forward_only=*/true), sequences_of(answers),
      micro_batches(answers, config_.reward_micro_batches(), config_.longest_sequence()));
  return DataProto({{"rm_scores", scores}});
}

}  // namespace ferry::trainer
