// All roles of a run of PPO on this rank, and what rank 0 can ask of them on all. The methods,
// under verl's names, and how they are dispatched:
//
//   generate_sequences                                        MEGATRON_COMPUTE_PROTO of the rollout
//   compute_log_prob, update_actor                            ... of the actor
//   compute_ref_log_prob                                      ... of the reference
//   compute_values, update_critic                             ... of the critic
//   compute_rm_score                                          ... of the reward model
//   compute_reward                                            DP_COMPUTE_PROTO; RANK_ZERO for a
//                                                             program's, and one step off
//   update_weights, sleep_rollout                             ONE_TO_ALL
//   {actor,critic}/{save,load}_checkpoint, .../finish_save    ONE_TO_ALL of the role
//   ROLE/get_megatron_global_info                             ... of each
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "models/distributed/world.h"
#include "trainer/config/ppo_config.h"
#include "trainer/dataset/prompt_examples.h"
#include "trainer/metrics/timeline.h"
#include "trainer/run/profiler.h"
#include "trainer/workers/actor_rollout_ref_worker.h"
#include "trainer/workers/critic_worker.h"
#include "trainer/workers/megatron_info.h"
#include "trainer/workers/reward_manager.h"
#include "trainer/workers/reward_model_worker.h"
#include "trainer/workers/worker_group.h"

namespace ferry::trainer {

class PpoWorkers {
 public:
  // Called by all ranks: loads the models. The encoder outlives this.
  PpoWorkers(models::World& world,
             const PpoConfig& config,
             std::shared_ptr<const converter::Checkpoint> origin,
             const PromptEncoder& encoder,
             std::int64_t total_steps);
  ~PpoWorkers();

  WorkerGroup& group() { return group_; }
  // On rank 0.
  std::vector<RoleMesh> meshes();
  std::int64_t num_reward_restarts() const { return reward_.num_restarts(); }  // on rank 0

  // On all ranks, before the first call: the spans of what this rank does go there, from that step
  // on. Rank 0's phases are for its caller to time.
  void begin_timeline(const std::filesystem::path& folder, std::int64_t first_step);

  // A call says which step it is of: meta_info.global_step.
  void serve();

 private:
  void add(const std::string& name,
           const std::string& phase,
           const Dispatch& dispatch,
           WorkerGroup::Method method);
  void add_roles();
  void add_mesh(const std::string& role, const models::ParallelState* mesh);
  void enter_step(std::int64_t step);

  models::World& world_;
  PpoConfig config_;
  WorkerGroup group_;
  std::unique_ptr<ActorRolloutRefWorker> policy_;
  std::unique_ptr<CriticWorker> critic_;
  std::unique_ptr<RewardModelWorker> reward_model_;
  RewardManager reward_;
  std::unique_ptr<Timeline> timeline_;
  StepProfiler profiler_;
  std::vector<std::string> roles_;
  std::int64_t step_ = 0;
};

}  // namespace ferry::trainer
