// A run as its memory and time are planned: the models of its roles, their meshes and what a step
// has to do, out of its configuration.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "models/spec/mesh_shape.h"
#include "models/spec/transformer_config.h"
#include "trainer/config/ppo_config.h"
#include "trainer/config/sft_config.h"
#include "trainer/plan/device_table.h"
#include "trainer/plan/memory_advice.h"
#include "trainer/plan/model_role.h"

namespace ferry::trainer {

// A model on the mesh of its ranks.
struct RoleSetup {
  Role role = Role::kActor;
  models::TransformerConfig model{};
  EngineConfig engine{};
  std::vector<int> ranks{};  // of the run, in their order on the mesh
  MemorySettings memory{};
  bool trains = false;
  std::int64_t updates = 0;  // of a step
  std::int64_t epochs = 1;   // in which each sequence of a step is learned from

  models::MeshShape mesh() const { return {engine.parallel, static_cast<int>(ranks.size())}; }
};

struct RolloutSetup {
  std::vector<int> ranks{};
  models::ParallelConfig parallel{};
  RolloutConfig settings{};
  bool shares_memory = false;  // with the actor
  bool computes_old_log_prob = true;

  models::MeshShape mesh() const { return {parallel, static_cast<int>(ranks.size())}; }
};

struct RunSetup {
  DeviceSpec device{};
  int world_size = 1;
  std::vector<RoleSetup> roles{};  // the actor is the first
  std::optional<RolloutSetup> rollout{};
  std::int64_t sequences = 0;         // of a step
  std::int64_t prompt_tokens = 0;     // of a sequence, at most; answers fill the rest
  std::int64_t longest_sequence = 0;  // tokens; the plan takes all to be so long
  bool saves = false;
  bool async_save = false;
  std::int64_t image_tokens = 0;  // of a sequence's image, which a tower computes
};

// The models of a run of reinforcement learning.
struct ModelsOfRun {
  models::TransformerConfig actor{};
  models::TransformerConfig critic{};  // with its value head
  models::TransformerConfig reward{};
};

// Throw Error(kUsage), which names section and keys, for a mesh that does not fill its ranks, that
// the model cannot be split over, among whose data parallel ranks an update's sequences cannot be
// shared out, or whose interleaved pipeline they cannot fill.
RunSetup setup_of(const SftConfig& config,
                  const models::TransformerConfig& model,
                  int world_size,
                  const DeviceSpec& device);
RunSetup setup_of(const PpoConfig& config,
                  const ModelsOfRun& models,
                  int world_size,
                  const DeviceSpec& device);

// The settings that decide whether a role fits into memory.
MemorySettings memory_settings(const SftConfig& config);
MemorySettings memory_settings(const PpoConfig& config, Role role);

}  // namespace ferry::trainer
