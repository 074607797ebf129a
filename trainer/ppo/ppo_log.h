// A run of PPO as it writes itself down, on rank 0: phases on the timeline, metrics of each step
// under verl's names, and lines for people.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/distributed/world.h"
#include "models/spec/transformer_config.h"
#include "trainer/agents/session_journal.h"
#include "trainer/config/ppo_config.h"
#include "trainer/engine/peak_memory.h"
#include "trainer/plan/device_table.h"
#include "trainer/run/run_record.h"
#include "trainer/update/rollout_batch.h"
#include "trainer/workers/megatron_worker.h"

namespace ferry::trainer {

class PpoLog {
 public:
  // `step`: behind which the run begins; `total_steps`: of the run. `world` outlives this.
  // Writes the configuration into the run's folder.
  PpoLog(const PpoConfig& config,
         const models::World& world,
         const models::TransformerConfig& actor,
         std::int64_t step,
         std::int64_t total_steps,
         std::function<void(const std::string&)> say);
  ~PpoLog();

  void say(const std::string& line) const { say_(line); }

  // Runs `body` as a span of the timeline, until the device has done it.
  void phase(const char* name, const std::function<void()>& body);

  // Takes those of programs, within a phase.
  void add_spans(std::vector<Span> spans);

  void begin_step(std::int64_t step);
  // Metrics of the step in hand.
  Metrics& metrics() { return metrics_; }
  // Says which update was skipped for a gradient that is not finite.
  void add_update(const char* method, const UpdateOutput& output);
  // Writes all metrics of the step, and its line.
  void end_step(const RolloutBatch& batch);

  // Journals the sessions of a batch, of several turns, as those of a step or of the validation
  // behind it.
  void write_sessions(std::int64_t step, bool validates, const RolloutBatch& batch) const;
  void write(std::int64_t step, const Metrics& metrics) const { record_.write(step, metrics); }
  // Runs `save` as a phase behind the numbers of the step, and writes how long it took.
  void time_save(const std::function<void()>& save);
  void finish() { record_.finish(); }

 private:
  void add_costs(const RolloutBatch& batch);

  const PpoConfig& config_;
  const models::World& world_;
  models::TransformerConfig actor_;
  std::function<void(const std::string&)> say_;
  std::optional<DeviceSpec> gpu_;  // nothing where it is not known
  RunRecord record_;
  std::unique_ptr<SessionJournal> journal_;
  std::int64_t step_ = 0;
  double started_ = 0;
  Metrics metrics_;
  PeakMemory memory_;
};

}  // namespace ferry::trainer
