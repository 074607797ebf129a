// All roles of a run of PPO on this rank, and the calls that rank 0 makes of them on all. The
// methods, under verl's names, and how they are dispatched:
//
//   generate_sequences                                        MEGATRON_COMPUTE_PROTO of the rollout
//   carried_sessions, carry_sessions                          ... of the rollout
//   compute_log_prob, update_actor, keep_rows                 ... of the actor
//   compute_ref_log_prob                                      ... of the reference
//   compute_values, update_critic                             ... of the critic
//   compute_rm_score                                          ... of the reward model
//   compute_reward                                            DP_COMPUTE_PROTO; RANK_ZERO for a
//                                                             program's, and in async runs
//   update_weights, sleep_rollout                             ONE_TO_ALL
//   {actor,critic}/{save,load}_checkpoint, .../finish_save    ONE_TO_ALL of the role
//   ROLE/mesh                                                 ... of each
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "models/distributed/world.h"
#include "trainer/config/ppo_config.h"
#include "trainer/dataset/prompt_examples.h"
#include "trainer/metrics/metrics.h"
#include "trainer/metrics/timeline.h"
#include "trainer/run/profiler.h"
#include "trainer/run/rank_memory.h"
#include "trainer/workers/actor_rollout_ref_worker.h"
#include "trainer/workers/critic_worker.h"
#include "trainer/workers/reward_manager.h"
#include "trainer/workers/reward_model_worker.h"
#include "trainer/workers/worker_group.h"

namespace ferry::trainer {

class PpoWorkers {
 public:
  // Called by all ranks: loads the models. The encoder outlives this. `tools`: of sessions.
  PpoWorkers(models::World& world,
             const PpoConfig& config,
             const std::shared_ptr<const converter::Checkpoint>& origin,
             const PromptEncoder& encoder,
             const Tools& tools,
             std::int64_t total_steps);
  ~PpoWorkers();

  // Called by all ranks, in the same order: one method more. Its work is `phase` on the timeline.
  void add(const std::string& name,
           const StepPhase& phase,
           const Dispatch& dispatch,
           WorkerGroup::Method method);

  // Calls, on rank 0. Each sends the columns that its method reads, to each rank the rows that it
  // computes, and returns the columns that it made, in the order of the batch; columns of tokens
  // stay with the ranks that made them.
  //
  // The step that the following calls are of.
  void begin_step(std::int64_t step) { called_step_ = step; }
  WorkerData ask(const std::string& method,
                 RolloutBatch batch,
                 RowsOfRanks rows = {},
                 nlohmann::json meta_info = nlohmann::json::object());
  // Whole rows with responses; start() returns when the other ranks have been told. A partial
  // rollout of `num_groups` groups, of all ranks, gives their rows, by their seeds, in any order.
  WorkerGroup::Call start_generating(const RolloutBatch& prompts, Sampling sampling);
  RolloutBatch finish_generating(WorkerGroup::Call call);
  // Nothing but that the actor's ranks keep the columns of tokens from now on.
  RolloutBatch keep_rows(const RolloutBatch& batch);
  // The batch with all columns here.
  RolloutBatch gather_rows(const RolloutBatch& batch);
  // The sessions of a partial rollout that have not been returned, those of one data parallel rank
  // behind another's: ActorRolloutRefWorker's. As many go back to each; `prompts`: of each.
  RolloutBatch carried_sessions();
  void carry_sessions(const RolloutBatch& prompts, const RolloutBatch& sessions);
  int num_rollout_parts() const { return group_.num_parts("generate_sequences"); }
  RolloutBatch compute_reward(const RolloutBatch& batch);
  RolloutBatch compute_rm_score(const RolloutBatch& batch);  // scores
  RolloutBatch compute_log_prob(const RolloutBatch& batch);
  RolloutBatch compute_ref_log_prob(const RolloutBatch& batch);
  RolloutBatch compute_values(const RolloutBatch& batch);
  UpdateOutput update_critic(const RolloutBatch& batch);
  UpdateOutput update_actor(const RolloutBatch& batch);
  void update_weights(std::int64_t weights_step);
  void sleep_rollout();
  // Saves and loads the actor, and the critic if there is one, as MegatronWorker does.
  void save_checkpoints(std::int64_t step, const std::map<std::string, std::string>& caller);
  bool finish_saves(bool wait);
  std::map<std::string, std::string> load_checkpoints(std::int64_t step,
                                                      const std::filesystem::path& run);
  void stop() { group_.stop(); }
  // The times of this rank's tools and workers of rewards since this was called last.
  std::vector<Span> take_spans() { return std::exchange(spans_, {}); }
  // perf/messages_{s,mb}/<method>: WorkerGroup::take_costs(), of runs of several ranks; in async
  // ones perf/rollouter/busy_s, of the answers that have arrived.
  Metrics message_metrics();
  std::int64_t num_reward_restarts() const { return reward_restarts_ + reward_.num_restarts(); }

  // On all ranks, before the first call: of memory that will be missing, for people.
  std::vector<std::string> expect_memory() const { return memory_.expect(); }

  // On all ranks, before the first call: the spans of what this rank does go there, from that step
  // on. Rank 0's phases are for its caller to time.
  void begin_timeline(const std::filesystem::path& folder, std::int64_t first_step);

  // On the others: until stop().
  void serve();

 private:
  void add_roles();
  void add_checkpoints(const std::string& role, MegatronWorker* worker);
  void enter_step(std::int64_t step);

  RolloutBatch asked_prompts(const RolloutBatch& prompts) const;
  std::vector<std::string> saved_roles() const;
  RowsOfRanks rows_of_ranks(const std::string& method,
                            const RolloutBatch& batch,
                            const RolloutBatch::Rows& order,
                            std::int64_t mini_batch) const;
  // The same, of a role with data parallel ranks of about the same work.
  RolloutBatch ask_balanced(const std::string& method, RolloutBatch batch);
  UpdateOutput ask_update(const std::string& method,
                          RolloutBatch batch,
                          const MiniBatches& mini_batches);

  models::World& world_;
  PpoConfig config_;
  WorkerGroup group_;
  std::unique_ptr<ActorRolloutRefWorker> policy_;
  std::unique_ptr<CriticWorker> critic_;
  std::unique_ptr<RewardModelWorker> reward_model_;
  RewardManager reward_;
  std::unique_ptr<Timeline> timeline_;
  StepProfiler profiler_;
  RankMemory memory_;
  std::int64_t step_ = 0;  // that this rank is in
  // On rank 0:
  std::int64_t called_step_ = 0;
  std::int64_t reward_restarts_ = 0;  // of workers that score while answers are written
  RolloutBatch gathered_;             // by gather_rows(), on rank 0
  std::vector<Span> spans_;           // within the calls of this rank
};

}  // namespace ferry::trainer
