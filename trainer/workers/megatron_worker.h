// A worker of one role: a model on its mesh (verl's MegatronWorker), with what the calls of all
// roles have in common.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "models/distributed/world.h"
#include "rollout/vision/vision_encoder.h"
#include "trainer/config/ppo_config.h"
#include "trainer/dataset/prompt_examples.h"
#include "trainer/engine/megatron_engine.h"
#include "trainer/engine/peak_memory.h"
#include "trainer/engine/seqlen_balancing.h"
#include "trainer/engine/visual_inputs.h"
#include "trainer/update/rollout_batch.h"
#include "trainer/workers/worker_group.h"

namespace ferry::trainer {

struct UpdateOutput {
  // Means over the updates, with <role>/grad_norm, <role>/lr and, of experts, <role>/moe/...; and
  // <role>/skipped, if there were, updates that were not made: for a gradient that is not finite,
  // or no token that counts.
  std::map<std::string, double> metrics{};
  std::string not_finite{};  // the parameter whose gradient was not, of the last such update
  // The factor of the loss in the next update, which one that is not finite has lowered; 1 where
  // the loss is not scaled.
  double loss_scale = 1;
  PeakMemory max_memory{};  // of any rank of the role
};

class MegatronWorker {
 public:
  // Called by the ranks of the role's mesh. `resting` lies on the host while no call needs it.
  MegatronWorker(models::World& world, MegatronEngineOptions options, OffloadFlags resting);
  MegatronWorker(const MegatronWorker&) = delete;
  MegatronWorker& operator=(const MegatronWorker&) = delete;

  // Images in prompts are those of this encoder, which outlives this. Throws Error(kUsage) for a
  // tower that cuts images into other patches.
  void see(const PromptEncoder& encoder);
  // The images of the batch's rows. Throws Error(kUsage) where it has some, and the model does not
  // see.
  VisualInputs visual_inputs(const RolloutBatch& batch) const;

  Dispatch dispatch() const { return megatron_compute_proto(engine_->mesh()); }
  MegatronEngine& engine() const { return *engine_; }

  // `caller` goes on with the run; `async`: is written in the background.
  void save_checkpoint(std::int64_t step,
                       const std::map<std::string, std::string>& caller,
                       bool async);
  // Finishes a save in the background, if it has ended or `wait`. Returns whether there was one and
  // it is done. (verl: async_calls_finalize_fn_exec)
  bool finish_save(bool wait);
  // Loads a step of this run, or of another one's folder `root` unless it is empty. Returns the
  // caller's texts.
  std::map<std::string, std::string> load_checkpoint(std::int64_t step, const std::string& root);

  // RAII: brings offloaded parts to the device, and takes them back.
  class Awake {
   public:
    Awake(const MegatronWorker& worker, OffloadFlags needed);
    ~Awake();
    Awake(const Awake&) = delete;
    Awake& operator=(const Awake&) = delete;

   private:
    Offload& offload_;
    OffloadFlags which_;
  };

  std::vector<Partition> micro_batches(const RolloutBatch& batch,
                                       const MicroBatchSize& size,
                                       std::int64_t longest_sequence) const;
  // The same to run them forward alone: with as many rows of padding as an interleaved pipeline
  // needs to run whole groups (forward_sequences.h).
  std::vector<Partition> padded_micro_batches(const RolloutBatch& batch,
                                              const MicroBatchSize& size,
                                              std::int64_t longest_sequence) const;

  // Learns from each mini-batch of this rank's rows, which follow each other, then steps the
  // optimizer; over all epochs. With shuffle the rows are those of all epochs, as shuffled_epochs()
  // gives them, and are met once. `learn` returns the metrics of a mini-batch, none if it has no
  // token that counts.
  UpdateOutput update(const RolloutBatch& batch,
                      const MiniBatches& mini_batches,
                      const std::function<std::map<std::string, double>(
                          const RolloutBatch& mini_batch, double grad_scale)>& learn);

 private:
  models::World& world_;
  std::unique_ptr<MegatronEngine> engine_;
  OffloadFlags resting_;
  const PromptEncoder* prompts_ = nullptr;          // of models that see
  std::unique_ptr<rollout::VisionEncoder> vision_;  // theirs
};

}  // namespace ferry::trainer
