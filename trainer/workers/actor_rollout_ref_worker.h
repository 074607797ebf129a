// The worker of the policy: the actor that learns, the rollout that answers with its weights, the
// reference that it is kept near, each on its own mesh, on the same ranks or on others (verl's
// ActorRolloutRefWorker). A rank has those of the three whose ranks it is one of.
//
// Where actor and rollout share ranks and cut the model alike, the rollout computes with the
// actor's own memory; elsewhere a HybridEngine reshards it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/distributed/parallel_state.h"
#include "models/distributed/world.h"
#include "rollout/llm_engine.h"
#include "trainer/config/ppo_config.h"
#include "trainer/update/update_actor.h"
#include "trainer/workers/hybrid_engine.h"
#include "trainer/workers/megatron_worker.h"

namespace ferry::trainer {

class ActorRolloutRefWorker {
 public:
  // Called by all ranks of the world. `total_steps`: of the run, for the schedule of the rate.
  ActorRolloutRefWorker(models::World& world,
                        const PpoConfig& config,
                        std::shared_ptr<const converter::Checkpoint> origin,
                        std::int64_t total_steps);
  ~ActorRolloutRefWorker();

  // The rollout takes what memory of a GPU is left then: after all other roles have theirs. Called
  // by all ranks of the world. `eos_token_ids` end an answer.
  void init_rollout(std::vector<std::int64_t> eos_token_ids);

  // Parts of calls on this rank.
  Dispatch actor_dispatch() const;
  Dispatch ref_dispatch() const;
  Dispatch rollout_dispatch() const;

  // prompts, attention_mask [rows, P], seeds [rows] -> responses [rows, R], attention_mask [rows,
  // P + R], response_mask, rollout_log_probs [rows, R], of the distribution that was drawn from:
  // the model's at the temperature, of what top_k and top_p leave of it; weights_step [rows], that
  // of update_weights(). meta_info: temperature, top_k, top_p; entropy: whether the answers have
  // entropys [rows, R], of the same distribution; sampling_mask: whether they have the column
  // sampling_mask, of what top_k and top_p left (batch_rows.h); routed_experts, with
  // router_replay.mode R3: whether the answers have routed_experts [rows, P + R, layers with
  // experts, topk], where the rollout's routers sent all tokens but the last. Needs the rollout's
  // weights: update_weights().
  DataProto generate_sequences(const DataProto& prompts);
  // -> old_log_probs, entropys [rows, R]; with router_replay.mode R2 routed_experts, of all tokens.
  // Those that the batch has are replayed, by update_actor() as well; so are sampling masks, by
  // compute_ref_log_prob(), too. meta_info: temperature.
  DataProto compute_log_prob(const DataProto& batch);
  // -> ref_log_prob [rows, R].
  DataProto compute_ref_log_prob(const DataProto& batch);
  // old_log_probs, advantages, perhaps ref_log_prob, rollout_is_weights [rows, R]; for clip_cov and
  // kl_cov row [rows], its number in the batch -> meta_info.metrics.
  DataProto update_actor(const DataProto& batch);
  // The actor's weights to the rollout, which wakes; -> meta_info.reshard, what this rank moved.
  // meta_info: weights_step, the step behind which they are.
  DataProto update_weights(const DataProto& call);
  // The rollout sleeps.
  DataProto sleep_rollout(const DataProto& call);
  DataProto save_checkpoint(const DataProto& call);
  DataProto load_checkpoint(const DataProto& call);

  // Null where this rank has no part in them.
  MegatronWorker* actor() const { return actor_.get(); }
  MegatronWorker* ref() const { return ref_.get(); }
  const models::ParallelState* rollout_mesh() const { return rollout_mesh_.get(); }

 private:
  bool shares_memory() const;
  rollout::SamplingParams sampling_params(const nlohmann::json& meta_info) const;
  DataProto log_probs(MegatronWorker& worker,
                      const DataProto& batch,
                      const MicroBatchSize& size,
                      bool with_entropy,
                      const char* name,
                      std::vector<at::Tensor>* routed_experts = nullptr) const;
  // `number`: of the update in its step.
  std::map<std::string, double> learn(const DataProto& batch,
                                      double grad_scale,
                                      std::int64_t number);
  at::Tensor cov_tokens(const DataProto& batch,
                        const ActorUpdate& update,
                        std::int64_t number) const;

  models::World& world_;
  PpoConfig config_;
  std::shared_ptr<const converter::Checkpoint> origin_;
  std::unique_ptr<MegatronWorker> actor_, ref_;
  std::unique_ptr<models::ParallelState> rollout_mesh_;
  std::vector<std::unique_ptr<models::GPTModel>> rollout_model_;  // none where memory is shared
  std::unique_ptr<rollout::LLMEngine> engine_;
  std::unique_ptr<HybridEngine> hybrid_;
  std::int64_t weights_step_ = 0;  // of the rollout's weights
};

}  // namespace ferry::trainer
