// The rules of the sections that every kind of run has.
#pragma once

#include "trainer/config/config_rules.h"
#include "trainer/config/run_sections.h"

namespace ferry::trainer {

ConfigRules<EngineConfig> mesh_rules();
ConfigRules<EngineConfig> recompute_rules();
ConfigRules<EngineConfig> load_balancing_rules();
ConfigRules<OptimConfig> optim_rules();
IneffectiveKeys<OptimConfig> ineffective_in_optim();
IneffectiveKeys<GlobalProfilerConfig> ineffective_in_profiler();

// Sections that rules relate to each other, under the names that they have in every run.
struct RunView {
  const CheckpointSection& checkpoint;
  const TrainerConfig& trainer;
  const GlobalProfilerConfig& global_profiler;
  const std::vector<std::string>& val_files;  // data.val_files
  bool saves = false;                         // some checkpoint, at least behind the last step
};
ConfigRules<RunView> run_rules();

// The profiler section of a role, beside the global one.
struct ProfilerView {
  const GlobalProfilerConfig& global;
  const ProfilerConfig& role;
};
ConfigRules<ProfilerView> profiler_rules();

// The cut of a role's sequences into micro-batches.
struct MicroBatchView {
  MicroBatchSize size{};
  int context_parallel_size = 1;
  std::int64_t longest_sequence = 1;  // tokens
  std::int64_t batch_size = 0;        // sequences of an update
};
struct MicroBatchKeys {  // where that stands: roles have names of their own for the same
  std::string use_dynamic_bsz{};
  std::string max_token_len_per_gpu{};
  std::string micro_batch_size_per_gpu{};
  std::string context_parallel_size{};
  std::vector<std::string> longest_sequence{};  // their sum
  std::vector<std::string> batch_size{};        // empty: the role does not learn
};
ConfigRules<MicroBatchView> micro_batch_rules(const MicroBatchKeys& keys);
IneffectiveKeys<MicroBatchView> ineffective_sizes(const MicroBatchKeys& keys);

}  // namespace ferry::trainer
