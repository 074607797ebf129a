// The model of one role on its mesh, and what trains it (verl's MegatronEngine): parameters, and
// where the role learns gradients, the distributed optimizer, its schedule and its checkpoints. A
// role that only computes, such as a reference, has the parameters alone.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "converter/open/checkpoint.h"
#include "models/distributed/parallel_state.h"
#include "models/distributed/world.h"
#include "models/gpt_model.h"
#include "rollout/vision/vision_encoder.h"
#include "trainer/config/run_sections.h"
#include "trainer/engine/pipeline/p2p_communication.h"
#include "trainer/engine/pipeline/pipeline_schedule.h"
#include "trainer/engine/seqlen_balancing.h"
#include "trainer/engine/training_checkpoint.h"
#include "trainer/optimizer/distributed_data_parallel.h"
#include "trainer/optimizer/distributed_optimizer.h"
#include "trainer/optimizer/offload.h"
#include "trainer/optimizer/optimizer_param_scheduler.h"
#include "trainer/plan/memory_advice.h"
#include "trainer/plan/model_role.h"

namespace ferry::trainer {

struct MegatronEngineOptions {
  Role role = Role::kActor;
  // Weights come from here; `model` is the section that names it.
  std::shared_ptr<const converter::Checkpoint> origin{};
  ModelConfig model{};
  EngineConfig engine{};
  std::vector<int> ranks{};  // of the world; empty: all
  bool value_head = false;  // one value of each token: of a language model's checkpoint, a new head
  MemorySettings memory{};

  struct Training {
    OptimizerConfig optimizer{};
    OptimizerParamSchedulerConfig scheduler{};
    CheckpointConfig checkpoint{};  // name and origin are the engine's
  };
  std::optional<Training> training{};
};

class MegatronEngine {
 public:
  // Called by the ranks of the mesh: loads the model. Throws Error; of memory that could not be had
  // it names the buffer and what would fit.
  MegatronEngine(models::World& world, MegatronEngineOptions options);
  ~MegatronEngine();
  MegatronEngine(const MegatronEngine&) = delete;
  MegatronEngine& operator=(const MegatronEngine&) = delete;

  const MegatronEngineOptions& options() const { return options_; }
  const models::ParallelState& mesh() const { return mesh_; }
  const converter::Checkpoint& origin() const { return *options_.origin; }
  const models::TransformerConfig& config() const { return config_; }
  const MemoryAdvice& memory() const { return advice_; }
  const std::vector<models::GPTModel*>& chunks() const { return chunks_; }
  double seconds_to_load() const { return seconds_to_load_; }
  bool is_interleaved() const { return chunks_.size() > 1; }
  bool trains() const { return optimizer_ != nullptr; }

  // For passes that are learned from, or not.
  Pipeline pipeline(bool forward_only = false) const;

  // A role that learns has these. The scheduler's rates are those of the next step.
  DistributedOptimizer& optimizer() const { return *optimizer_; }
  OptimizerParamScheduler& scheduler() const { return *scheduler_; }
  TrainingCheckpoint& checkpoint() const { return *checkpoint_; }
  TrainingCheckpoint checkpoint_at(const std::filesystem::path& root) const;  // of another run
  Offload& offload() const { return *offload_; }
  StepReport optimizer_step();
  // The vision tower for images that `config` says how to read: the model's own if it is trained,
  // else loaded from the origin when it is first used. The engine outlives it.
  std::unique_ptr<rollout::VisionEncoder> make_vision_encoder(
      const rollout::ImageProcessorConfig& config) const;
  // moe/load_max and others of the last step's batch; none for a model without experts.
  const std::map<std::string, double>& balance_metrics() const { return balance_metrics_; }

  // A batch of so many sequences can be shared by the data parallel ranks and cut into whole groups
  // of micro-batches, whatever their lengths.
  std::int64_t batch_unit(const MicroBatchSize& size) const;
  // The micro-batches of this data parallel rank's sequences: up to `max_token_len` tokens on the
  // ranks of a context parallel group together, or as many sequences as `size` says.
  std::vector<Partition> micro_batches(std::span<const std::int64_t> seqlens,
                                       const MicroBatchSize& size,
                                       std::int64_t max_token_len) const;

  // Writes all that a run goes on from; in the background, after a copy to the host.
  void save(std::int64_t step, const CallerState& caller, bool in_background);

 private:
  std::int64_t group_of_micro_batches() const;  // an interleaved pipeline runs whole ones
  void allocate(const char* name,
                std::int64_t bytes,
                std::int64_t held,
                const std::function<void()>& body) const;

  MegatronEngineOptions options_;
  models::World& world_;
  models::ParallelState mesh_;
  models::TransformerConfig config_;
  bool trains_vision_;
  MemoryAdvice advice_;
  std::vector<std::unique_ptr<models::GPTModel>> owned_chunks_;
  std::vector<models::GPTModel*> chunks_;
  double seconds_to_load_ = 0;
  std::optional<P2PCommunicator> p2p_;
  std::unique_ptr<DistributedDataParallel> ddp_;
  std::unique_ptr<DistributedOptimizer> optimizer_;
  std::unique_ptr<OptimizerParamScheduler> scheduler_;
  std::unique_ptr<TrainingCheckpoint> checkpoint_;
  std::unique_ptr<Offload> offload_;
  std::unique_ptr<LoadBalancing> balancing_;  // of a role that learns with experts
  std::map<std::string, double> balance_metrics_;
};

}  // namespace ferry::trainer
