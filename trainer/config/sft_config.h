// The configuration of a run of supervised fine-tuning: one TOML file, overrides on the command
// line. Names are verl's and Megatron-Core's; docs/training_config.md has what they mean, out of
// the same list that reads them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "distckpt/parallel_config.h"

namespace ferry::trainer {

struct ModelConfig {
  std::string path{};
  std::string hf_config_path{};
  std::string tokenizer_path{};
  bool operator==(const ModelConfig&) const = default;
};

struct EngineConfig {
  distckpt::ParallelConfig parallel{};
  std::optional<bool> sequence_parallel{};  // default: where tp > 1
  std::string alignment = "fast";
  std::string dtype = "bfloat16";
  std::optional<std::string> recompute_granularity{};
  std::vector<std::string> recompute_modules{};
  std::optional<std::string> recompute_method{};
  std::optional<int> recompute_num_layers{};
  bool grad_offload = false;
  bool optimizer_offload = false;
  bool operator==(const EngineConfig&) const = default;

  bool uses_sequence_parallel() const {
    return sequence_parallel.value_or(parallel.tensor_model_parallel_size > 1);
  }
  // Throws Error(kUsage) unless the mesh fills the world.
  int data_parallel_size(int world_size) const;
};

struct DataConfig {
  std::vector<std::string> train_files{};
  std::vector<std::string> val_files{};
  std::string messages_key = "messages";
  std::string prompt_key = "prompt";
  std::string response_key = "response";
  std::string tools_key = "tools";
  bool shuffle = true;
  std::int64_t shuffle_buffer_bytes = std::int64_t{256} << 20;
  std::string malformed_rows = "skip";
  int max_length = 1024;
  std::string truncation = "error";
  int global_batch_size = 256;
  bool use_dynamic_bsz = true;
  std::optional<int> max_token_len_per_gpu{};  // default: max_length / cp
  std::optional<int> micro_batch_size_per_gpu{};
  bool operator==(const DataConfig&) const = default;
};

struct OptimConfig {
  double lr = 1e-5;
  double min_lr = 0;
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.999;
  double adam_eps = 1e-8;
  double weight_decay = 0.01;
  std::optional<double> start_weight_decay{};
  std::optional<double> end_weight_decay{};
  std::string weight_decay_incr_style = "constant";
  bool decoupled_weight_decay = true;
  double clip_grad = 1.0;
  double lr_warmup_init = 0;
  std::optional<std::int64_t> lr_warmup_steps{};
  double lr_warmup_steps_ratio = 0;
  std::string lr_decay_style = "constant";
  std::optional<std::int64_t> lr_decay_steps{};  // default: the steps of the run
  std::optional<std::int64_t> lr_wsd_decay_steps{};
  std::string lr_wsd_decay_style = "exponential";
  bool operator==(const OptimConfig&) const = default;
};

struct SftCheckpointConfig {
  int save_freq = -1;
  std::optional<int> keep_last{};
  std::optional<int> keep_every{};
  bool async_save = false;
  bool save_hf = false;
  std::string resume_mode = "auto";
  std::string resume_from_path{};
  bool operator==(const SftCheckpointConfig&) const = default;
};

struct TrainerConfig {
  std::string default_local_dir = "checkpoints";
  std::string device = "cuda";
  int nccl_timeout = 600;
  std::optional<std::int64_t> total_training_steps{};  // default: those of total_epochs
  int total_epochs = 1;
  std::int64_t seed = 42;
  std::vector<std::string> logger{"console", "file"};
  bool val_before_train = false;
  int test_freq = -1;
  bool operator==(const TrainerConfig&) const = default;
};

struct GlobalProfilerConfig {
  std::optional<std::string> tool{};
  std::vector<std::int64_t> steps{};
  bool profile_continuous_steps = false;
  std::string save_path = "outputs/profile";
  bool discrete = false;
  bool operator==(const GlobalProfilerConfig&) const = default;
};

// Of a role; supervised fine-tuning has one.
struct ProfilerConfig {
  bool enable = false;
  bool all_ranks = false;
  std::vector<int> ranks{};
  bool operator==(const ProfilerConfig&) const = default;
};

struct SftConfig {
  ModelConfig model{};
  EngineConfig engine{};
  DataConfig data{};
  OptimConfig optim{};
  SftCheckpointConfig checkpoint{};
  TrainerConfig trainer{};
  GlobalProfilerConfig global_profiler{};
  ProfilerConfig profiler{};
  bool operator==(const SftConfig&) const = default;
};

// What the file says, then the overrides ("optim.lr=1e-5"), in their order; without a file (empty),
// the overrides alone. Throws Error(kUsage) for keys that are none, values of another type or out
// of range, and contradictions, each with file and line.
SftConfig load_sft_config(const std::filesystem::path& file,
                          const std::vector<std::string>& overrides);

// Every key with its value and meaning: TOML that loads to the same.
std::string to_toml(const SftConfig& config);

// Every key with its default and meaning, for the documentation.
std::string sft_config_reference();

}  // namespace ferry::trainer
