// A training run on disk: weights, fp32 masters and moments as sharded tensors, the scheduler, the
// steps and what the caller adds (a data cursor, RNG) in the common state of a Megatron-Core
// checkpoint, which Megatron-Core loads, too. On the same mesh a run goes on bit for bit, on
// another one with every tensor bit for bit.
//
// A save appears when all ranks have written, or not at all; then the tracker names it; then older
// ones go that nobody wants to keep.
#pragma once

#include <cstdint>
#include <filesystem>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "converter/bridge/save.h"
#include "converter/open/checkpoint.h"
#include "models/gpt_model.h"
#include "trainer/optimizer/distributed_optimizer.h"
#include "trainer/optimizer/host_snapshot.h"
#include "trainer/optimizer/optimizer_param_scheduler.h"

namespace ferry::trainer {

struct CheckpointConfig {
  std::string name = "model";    // tells the models of a run apart
  std::filesystem::path root{};  // of iterations; all ranks see it
  int keep_last = 0;             // so many of the latest; 0: all
  std::int64_t keep_every = 0;   // and iterations that are multiples of it; 0: none
  // The model was first loaded from it: its arguments and its tokenizer go along.
  const converter::Checkpoint* origin = nullptr;
  std::filesystem::path hf_config{};  // a folder with the config.json that a checkpoint of
                                      // Megatron-Core's lacks
  int threads = 0;                    // 0: one per core
};

// State that the caller goes on from, as UTF-8 text.
struct CallerState {
  std::map<std::string, std::string> shared{};  // the same on all ranks; of rank 0
  std::string of_rank{};                        // of each its own

  bool operator==(const CallerState&) const = default;
};

struct Resumed {
  std::int64_t iteration = 0;
  CallerState caller{};
  bool same_ranks = false;  // else of_rank is empty: there were more ranks, or fewer
};

// Checkpoints of one model; the arguments outlive it. Every function is called by all ranks of the
// mesh.
class TrainingCheckpoint {
 public:
  TrainingCheckpoint(models::World& world,
                     std::vector<models::GPTModel*> chunks,
                     DistributedOptimizer& optimizer,
                     OptimizerParamScheduler& scheduler,
                     CheckpointConfig config);
  TrainingCheckpoint(const TrainingCheckpoint&) = delete;
  TrainingCheckpoint& operator=(const TrainingCheckpoint&) = delete;

  // An iteration that is there already is replaced, when the new one is written.
  converter::SaveReport save(std::int64_t iteration, const CallerState& caller);

  // Copies everything to the host and returns; a thread writes it. First waits for the save before.
  void save_in_background(std::int64_t iteration, const CallerState& caller);
  // Waits for that save: its report, or what it threw. Nothing if none was begun since.
  std::optional<converter::SaveReport> finish_save();
  // True if that save has ended, well or not, and nobody has finished it: of this rank alone.
  bool save_has_ended() const;

  // Loads that iteration, or the one the tracker names. Throws Error(kNotFound | kLayout |
  // kCorrupt); then the model is not to be used.
  Resumed load(std::optional<std::int64_t> iteration = std::nullopt);

 private:
  std::vector<distckpt::LocalShard> shards() const;
  std::vector<at::Tensor> tensors() const;  // that the shards lie in
  std::shared_ptr<const distckpt::Pickle> common_state(const CallerState& caller) const;
  converter::SaveReport write(const models::ProcessGroup& ranks,
                              std::int64_t iteration,
                              std::vector<distckpt::LocalShard> shards,
                              std::shared_ptr<const distckpt::Pickle> common) const;

  models::World& world_;
  std::vector<models::GPTModel*> chunks_;
  DistributedOptimizer& optimizer_;
  OptimizerParamScheduler& scheduler_;
  CheckpointConfig config_;
  std::unique_ptr<models::ProcessGroup> background_ranks_;  // that nobody else talks over
  HostSnapshot snapshot_;
  std::future<converter::SaveReport> background_;  // its end waits for the thread
};

// The iterations in a run's folder, ascending; none without it.
std::vector<std::int64_t> saved_iterations(const std::filesystem::path& root);

// Does what a save does behind its last rename, for a run that was killed there: `step`, which the
// run goes on from, gets the tracker, older iterations go that nobody wants to keep, and so do the
// leftovers of killed saves up to it. Called by one process. Throws Error(kUsage) if another run is
// writing that step.
void publish_resumed(const CheckpointConfig& config, std::int64_t step);

// Throws Error(kUsage) if a run that begins behind `step` would write over what another one saved.
void require_none_newer(const std::filesystem::path& root, std::int64_t step);

// The latest iterations that each of so many roles keeps, if `keep_last` were asked for: two of
// several, so that a run that dies between their saves has one in common.
int kept_of_roles(int keep_last, std::size_t num_roles);

// The members of `iterations` that may go.
std::vector<std::int64_t> superseded(std::vector<std::int64_t> iterations,
                                     int keep_last,
                                     std::int64_t keep_every);

}  // namespace ferry::trainer
