// Supervised fine-tuning (verl's sft_trainer): the loop of ferry train sft, which every rank runs.
//
//   batch -> this rank's conversations -> packed micro-batches -> forward and backward through the
//   pipeline -> optimizer -> metrics, checkpoint
//
// The loss is the mean of - log p over all learned tokens of the global batch.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "converter/checkpoint.h"
#include "models/gpt_model.h"
#include "models/parallel_state.h"
#include "models/world.h"
#include "trainer/config/sft_config.h"
#include "trainer/data/record_stream.h"
#include "trainer/distributed_data_parallel.h"
#include "trainer/distributed_optimizer.h"
#include "trainer/metrics/metric_log.h"
#include "trainer/metrics/timeline.h"
#include "trainer/memory_needs.h"
#include "trainer/offload.h"
#include "trainer/optimizer_param_scheduler.h"
#include "trainer/p2p_communication.h"
#include "trainer/pipeline_schedule.h"
#include "trainer/profiler.h"
#include "trainer/sft_examples.h"
#include "trainer/training_checkpoint.h"

namespace ferry::trainer {

struct SftOutput {
  // Of rank 0: a line for people, without its newline.
  std::function<void(const std::string&)> say = [](const std::string&) {};
};

class SftTrainer {
 public:
  // Called by all ranks: loads the model, or the newest checkpoint of the run. Throws Error.
  SftTrainer(const SftConfig& config, models::World& world, SftOutput output = {});
  ~SftTrainer();

  // From where it stands to the last step. Throws Error(kCorrupt) after too many steps in a row
  // without a finite gradient.
  void run();

  std::int64_t step() const { return step_; }  // steps that are done
  std::int64_t total_steps() const { return total_steps_; }

 private:
  struct Batch;  // what this rank runs of a batch
  void load_model();
  void allocate_model(const char* name,
                      std::int64_t bytes,
                      std::int64_t held,
                      const std::function<void()>& body) const;
  void resume();
  std::vector<Conversation> next_conversations(RecordStream& records) const;
  Batch make_batch(const std::vector<Conversation>& conversations) const;
  // The mean loss of the global batch's learned tokens.
  double run_batch(const Batch& batch, bool forward_only, const models::Observer& observe = {});
  void say_not_finite(const Batch& batch, double loss, const StepReport& update);
  Metrics train_step();
  Metrics validate();
  void save();
  void save_hf(const std::filesystem::path& iteration) const;
  void finish_save();
  void report(const Metrics& metrics);
  bool is_interleaved() const { return chunks_.size() > 1; }
  bool is_rank_0() const { return world_.rank() == 0; }

  SftConfig config_;
  models::World& world_;
  SftOutput output_;
  models::ParallelState mesh_;
  converter::Checkpoint origin_;
  ModelMemory memory_;
  SftEncoder encoder_;
  RecordStream stream_;
  std::int64_t total_steps_;
  std::vector<std::unique_ptr<models::GPTModel>> owned_chunks_;
  std::vector<models::GPTModel*> chunks_;
  std::optional<P2PCommunicator> p2p_;
  std::unique_ptr<DistributedDataParallel> ddp_;
  std::unique_ptr<DistributedOptimizer> optimizer_;
  std::unique_ptr<OptimizerParamScheduler> scheduler_;
  std::unique_ptr<TrainingCheckpoint> checkpoint_;
  std::unique_ptr<Offload> offload_;
  std::int64_t step_ = 0;
  int not_finite_ = 0;           // steps in a row
  bool save_has_ended_ = false;  // in the background, on some rank
  std::unique_ptr<Timeline> timeline_;
  StepProfiler profiler_;
  std::vector<std::unique_ptr<MetricLog>> logs_;
};

}  // namespace ferry::trainer
