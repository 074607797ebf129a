// The engine that answers for a rank of the rollout, or for a replica of it, as the configuration
// says: the model, the engine and what runs sessions by it.
#pragma once

#include <memory>
#include <vector>

#include "converter/open/checkpoint.h"
#include "models/distributed/parallel_state.h"
#include "models/distributed/world.h"
#include "models/gpt_model.h"
#include "rollout/llm_engine.h"
#include "trainer/agents/agent_runner.h"
#include "trainer/config/ppo_config.h"
#include "trainer/dataset/prompt_examples.h"

namespace ferry::trainer {

struct RolloutEngine {
  std::vector<std::unique_ptr<models::GPTModel>>
      own{};  // none: it computes with the actor's memory
  models::GPTModel* model = nullptr;
  std::unique_ptr<rollout::LLMEngine> engine{};
  std::unique_ptr<AgentRunner> agents{};
};

// A model that generates, without weights. Called by all ranks of the mesh, which outlives it.
std::vector<std::unique_ptr<models::GPTModel>> rollout_model(const PpoConfig& config,
                                                             const converter::Checkpoint& origin,
                                                             const models::ParallelState& mesh);

// Called by all ranks of the mesh; all outlive the result. `shared`: the actor's model, or null:
// one is made, with weights of the checkpoint until it gets others.
RolloutEngine make_rollout(models::World& world,
                           const models::ParallelState& mesh,
                           const PpoConfig& config,
                           const converter::Checkpoint& origin,
                           const PromptEncoder& encoder,
                           const Tools& tools,
                           models::GPTModel* shared);

}  // namespace ferry::trainer
