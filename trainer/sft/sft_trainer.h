// Supervised fine-tuning (verl's sft_trainer): the loop of ferry train sft, which every rank runs.
//
//   batch -> this rank's conversations -> packed micro-batches -> forward and backward through the
//   pipeline -> optimizer -> metrics, checkpoint
//
// The loss is the mean of - log p over all learned tokens of the global batch.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "converter/open/checkpoint.h"
#include "models/distributed/world.h"
#include "models/gpt_model.h"
#include "trainer/config/sft_config.h"
#include "trainer/data/record_stream.h"
#include "trainer/dataset/sft_examples.h"
#include "trainer/engine/megatron_engine.h"
#include "trainer/metrics/metric_log.h"
#include "trainer/plan/device_table.h"
#include "trainer/run/planned_run.h"
#include "trainer/run/profiler.h"
#include "trainer/run/run_record.h"
#include "trainer/run/training_run.h"

namespace ferry::trainer {

struct SftOutput {
  // Takes a line for people, on rank 0, without its newline.
  std::function<void(const std::string&)> say = [](const std::string&) {};
};

class SftTrainer {
 public:
  // Called by all ranks: loads the model, or the newest checkpoint of the run. Throws Error.
  SftTrainer(const SftConfig& config, models::World& world, SftOutput output = {});
  ~SftTrainer();

  // Trains from where it stands to the last step. Throws Error(kCorrupt) after too many steps
  // in a row without a finite gradient.
  void run();

  std::int64_t step() const { return step_; }  // steps that are done
  std::int64_t total_steps() const { return length_.steps; }

 private:
  struct Batch;  // what this rank runs of a batch
  void resume();
  std::function<Conversation(const Record&)> parser() const;
  std::vector<Conversation> next_conversations(RecordStream& records) const;
  // `places`: where each conversation lies. Rows from `num_rows` on are padding, without weight.
  Batch make_batch(const std::vector<Conversation>& conversations,
                   const std::vector<std::string>& places,
                   std::size_t num_rows) const;
  // The mean loss of the global batch's learned tokens.
  double run_batch(const Batch& batch, bool forward_only, const models::Observer& observe = {});
  // Says once that rows have no token to learn. Throws Error(kCorrupt) where that is so of all rows
  // of too many steps in a row, or of the run.
  void count_unlearned(const Batch& batch);
  void say_not_finite(const Batch& batch, double loss, const StepReport& update);
  void expect_memory() const;  // before the first step
  // True where `frequency` says so, and behind the last step if that is `also_at_last`.
  bool is_due(const Frequency& frequency, bool also_at_last) const;
  Metrics train_step();
  Metrics validate();
  void save();
  void export_hf() const;
  void finish_save();
  bool is_rank_0() const { return world_.rank() == 0; }
  void say(const std::string& line) const {
    if (is_rank_0()) output_.say(line);
  }

  models::World& world_;
  SftOutput output_;
  std::shared_ptr<const converter::Checkpoint> origin_;
  Planned<SftConfig> planned_;
  const SftConfig& config_;  // as planned
  SftEncoder encoder_;
  RecordStream stream_;
  RunLength length_;
  MegatronEngine engine_;
  const models::ParallelState& mesh_;
  std::unique_ptr<rollout::VisionEncoder> vision_;  // null where no images are read
  std::int64_t step_ = 0;
  bool goes_on_ = false;                     // from a checkpoint of its own
  std::int64_t steps_without_learning_ = 0;  // in a row
  bool has_said_unlearned_ = false;
  NotFiniteSteps not_finite_;
  bool save_has_ended_ = false;  // in the background, on some rank
  std::unique_ptr<RunRecord> record_;
  std::optional<DeviceSpec> gpu_;  // nothing where it is not known
  StepProfiler profiler_;
};

}  // namespace ferry::trainer
