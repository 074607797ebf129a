// The actor's weights in two forms (verl's hybrid engine): the shards that it trains on, and those
// that the rollout generates with, on any two meshes, also of other ranks. rollout_mode() reshards
// the actor's into the rollout's; train_mode() lets the rollout sleep on ranks that the actor
// needs.
#pragma once

#include <string>
#include <vector>

#include "models/distributed/world.h"
#include "models/gpt_model.h"
#include "models/reshard/resharder.h"
#include "rollout/llm_engine.h"
#include "trainer/optimizer/offload.h"

namespace ferry::trainer {

struct HybridEngineOptions {
  // Parts of the actor on the host while the rollout generates; parameters, once they have been
  // resharded.
  OffloadFlags offload{};
  // The rollout's sleep where the actor is, too, while it trains: 1 gives the KV cache back, 2 the
  // weights too; 0: it stays awake.
  int sleep_level = 2;
  bool verify = false;  // the digest of every message of a reshard
  models::ReshardOptions reshard{};
};

// A rank's part in the rollout; several may share a tensor parallel group.
struct RolloutWorker {
  models::GPTModel* model = nullptr;
  rollout::LLMEngine* engine = nullptr;
};

class HybridEngine {
 public:
  // Called by all ranks of the world, each with its chunks of the actor and its rollout, either
  // perhaps none; `actor_offload` null: the actor stays where it is. All outlive this. Begins in
  // train_mode(). Throws Error(kUsage), on all ranks: in kBitwise, if any rank's rollout computes
  // by another numerical policy than the actor; in any mode, if deltas are sent to a rollout whose
  // weights sleep.
  HybridEngine(models::World& world,
               const std::string& name,
               std::vector<models::GPTModel*> actor,
               Offload* actor_offload,
               RolloutWorker rollout,
               HybridEngineOptions options);

  // Called by all ranks, in turn. The weights that the rollout had are gone, its prefix cache too.
  models::ReshardReport rollout_mode();
  void train_mode();

 private:
  std::vector<distckpt::LocalShard> rollout_shards() const;

  std::vector<models::GPTModel*> actor_;
  Offload* offload_;
  RolloutWorker rollout_;
  HybridEngineOptions options_;
  models::Resharder resharder_;
  bool rolling_ = true;
};

}  // namespace ferry::trainer
