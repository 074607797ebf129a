// The worker of the policy: the actor that learns, the rollout that answers with its weights, the
// reference that it is kept near, each on its own mesh, on the same ranks or on others (verl's
// ActorRolloutRefWorker). A rank has a part in any of the three.
//
// The rollout computes with the actor's own memory if both share ranks and cut the model alike;
// otherwise a HybridEngine reshards the actor's weights.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "models/distributed/parallel_state.h"
#include "models/distributed/world.h"
#include "trainer/agents/agent_runner.h"
#include "trainer/config/ppo_config.h"
#include "trainer/dataset/prompt_examples.h"
#include "trainer/metrics/timeline.h"
#include "trainer/replicas/replica_group.h"
#include "trainer/replicas/rollout_engine.h"
#include "trainer/update/compute_log_prob.h"
#include "trainer/update/update_actor.h"
#include "trainer/workers/hybrid_engine.h"
#include "trainer/workers/megatron_worker.h"
#include "trainer/workers/reward_manager.h"

namespace ferry::trainer {

// The way in which tokens are drawn, and what is returned beside them.
struct Sampling {
  double temperature = 1;
  std::int64_t top_k = -1;
  double top_p = 1;
  bool entropy = false;        // entropys of the distributions that tokens were drawn from
  bool sampling_mask = false;  // the tokens that top_k and top_p left
  bool routed_experts =
      false;  // where routers sent all tokens but the last (router_replay.mode R3)
  // The groups of answers that each data parallel rank returns of a partial rollout; 0: all. Groups
  // with a token by weights of `must_finish` or before are among them.
  std::int64_t num_groups = 0;
  std::int64_t must_finish = -1;
  std::int64_t learned_at = 0;  // the step; of a run that is played again it chooses the groups
};

class ActorRolloutRefWorker {
 public:
  // Called by all ranks of the world. `total_steps`: of the run, for the schedule of the rate.
  ActorRolloutRefWorker(models::World& world,
                        const PpoConfig& config,
                        std::shared_ptr<const converter::Checkpoint> origin,
                        std::int64_t total_steps);
  ~ActorRolloutRefWorker();

  // The rollout takes what memory of a GPU is left then: after all other roles have theirs. Called
  // by all ranks of the world. The encoder's eos_token_ids() end an answer; it outlives this.
  // `tools`: of sessions. `rewards`: scores answers as they are written, or null; outlives this.
  void init_rollout(const PromptEncoder& encoder,
                    const Tools& tools = {},
                    RewardManager* rewards = nullptr);

  // Parts of calls on this rank.
  Dispatch actor_dispatch() const;
  Dispatch ref_dispatch() const;
  Dispatch rollout_dispatch() const;

  // Draws a response to each prompt, by its seed. Returns whole rows with response_mask (all ones,
  // but for what others say in sessions of several turns, which also have turn_scores and
  // agent_info, and for which raw_prompt and what judges the answer are read), rollout_log_probs of
  // the distributions that tokens were drawn from, min_global_steps, max_global_steps, and what
  // `sampling` asks for; global_steps where the run is_async(); and, if answers are scored as they
  // are written, the columns of RewardManager::compute_reward(). Needs the rollout's weights:
  // update_weights().
  //
  // A partial rollout returns the groups that are finished first, with their seeds; the others go
  // on in the next one, with the weights of then.
  RolloutBatch generate_sequences(const RolloutBatch& prompts, const Sampling& sampling);
  // The sessions of partial rollouts that have not been returned, a row each, for a checkpoint; and
  // those of one, beside their prompts, with which the next rollout goes on. A session whose
  // environment or program was left in its midst begins again. Answers that were complete are
  // scored again if they are scored as they are written.
  RolloutBatch carried_sessions() const;
  void carry_sessions(const RolloutBatch& sessions);
  // The times of what programs did for sessions since this was called last: "tool/<name>",
  // "env/<method>", "reward/worker".
  std::vector<Span> take_spans() { return std::exchange(spans_, {}); }
  // Returns old_log_probs and entropys; with router_replay.mode R2 routed_experts, too. Routes that
  // the batch has are replayed, here and by update_actor(); sampling masks, by all passes.
  RolloutBatch compute_log_prob(const RolloutBatch& batch);
  // Returns ref_log_prob.
  RolloutBatch compute_ref_log_prob(const RolloutBatch& batch);
  // Reads what trainer::update_actor() does; for clip_cov and kl_cov also index. `step` decides the
  // draws of clip_cov.
  UpdateOutput update_actor(const RolloutBatch& batch, std::int64_t step);
  // Hands the actor's weights, those behind `weights_step`, to the rollout, which wakes.
  void update_weights(std::int64_t weights_step);
  void sleep_rollout() { hybrid_->train_mode(); }

  // Null where this rank has no part in them.
  MegatronWorker* actor() const { return actor_.get(); }
  MegatronWorker* ref() const { return ref_.get(); }

 private:
  // Has sessions scored when they are over, if this rank asks.
  SessionObserver observer_of(const std::vector<Session>& sessions) const;
  std::vector<Session> finished_groups(const Sampling& sampling,
                                       const rollout::SamplingParams& params);
  RolloutBatch answered(const std::vector<Session>& sessions, const Sampling& sampling) const;
  void take_spans_of(auto& part) {
    for (auto& span : part.take_spans()) spans_.push_back(std::move(span));
  }
  LogProbs log_probs(MegatronWorker& worker,
                     const RolloutBatch& batch,
                     const MicroBatchSize& size,
                     bool record_routes = false) const;
  RolloutBatch replayed(const RolloutBatch& batch) const;
  // `number`: of the update in its step.
  at::Tensor cov_tokens(const RolloutBatch& batch,
                        const PolicyLossConfig& loss,
                        std::int64_t step,
                        std::int64_t number) const;

  models::World& world_;
  PpoConfig config_;
  std::shared_ptr<const converter::Checkpoint> origin_;
  std::unique_ptr<MegatronWorker> actor_, ref_;
  std::unique_ptr<models::ParallelState> rollout_mesh_;
  RolloutEngine rollout_;                   // where this rank has a part in it
  std::unique_ptr<ReplicaGroup> replicas_;  // that help it
  const PromptEncoder* encoder_ = nullptr;
  RewardManager* rewards_ = nullptr;  // where this rank asks
  std::vector<Span> spans_;
  std::unique_ptr<HybridEngine> hybrid_;
  std::int64_t weights_step_ = 0;  // of the rollout's weights
  std::vector<Session> carried_;   // of partial rollouts: those that have not been returned
};

}  // namespace ferry::trainer
