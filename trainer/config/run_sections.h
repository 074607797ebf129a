// The sections that every kind of run has, of the same keys wherever they stand: a section of
// supervised fine-tuning is "optim", one of reinforcement learning "critic.optim".
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "models/spec/parallel_config.h"
#include "trainer/config/run_choices.h"

namespace ferry::trainer {

class ConfigTable;

struct ModelConfig {
  std::string path{};
  std::string hf_config_path{};
  std::string tokenizer_path{};
  bool operator==(const ModelConfig&) const = default;
};

struct EngineConfig {
  models::ParallelConfig parallel{};
  bool sequence_parallel = true;  // where tp > 1
  models::Alignment alignment = models::Alignment::kFast;
  distckpt::DType dtype = distckpt::DType::kBF16;
  std::optional<models::Recompute::Granularity> recompute_granularity{};  // default: auto
  std::vector<RecomputeModule> recompute_modules{};
  std::optional<models::Recompute::Method> recompute_method{};
  std::optional<int> recompute_num_layers{};
  bool grad_reduce_in_fp32 = true;
  bool freeze_vision_tower = false;  // of a role that does not learn it is true
  std::vector<LoadBalancingType> moe_router_load_balancing_type{LoadBalancingType::kNone};
  std::vector<double> moe_aux_loss_coeff{};
  double moe_z_loss_coeff = 0;
  double moe_router_bias_update_rate = 0;
  // Default: auto, which is false without a plan.
  std::optional<bool> param_offload{};  // reinforcement learning alone
  std::optional<bool> grad_offload{};
  std::optional<bool> optimizer_offload{};
  bool operator==(const EngineConfig&) const = default;

  models::Recompute recompute() const;
  bool uses_sequence_parallel() const {
    return sequence_parallel && parallel.tensor_model_parallel_size > 1;
  }
};

// Ranks that have the same part of a model. Throws Error(kUsage) "<section>: ...", with the keys of
// the sizes, unless the mesh fills the world. `ep_key`: the section's key for the ranks that share
// the experts.
int data_parallel_size(const models::ParallelConfig& parallel,
                       int world_size,
                       std::string_view section = "engine",
                       std::string_view ep_key = "expert_model_parallel_size");

// Micro-batches are packed up to a number of tokens, or have a number of sequences.
struct MicroBatchSize {
  static constexpr int kUsual = 16384;  // verl's ppo_max_token_len_per_gpu
  bool use_dynamic_bsz = true;
  std::optional<int>
      max_token_len_per_gpu{};  // without a plan: kUsual, or what the longest sequence needs
  std::optional<int> micro_batch_size_per_gpu{};
  bool operator==(const MicroBatchSize&) const = default;

  // Tokens of a micro-batch on the ranks of a context parallel group together.
  std::int64_t max_token_len(int context_parallel_size, std::int64_t longest_sequence) const {
    if (!max_token_len_per_gpu)
      return std::max(std::int64_t{kUsual} * context_parallel_size, longest_sequence);
    return std::int64_t{*max_token_len_per_gpu} * context_parallel_size;
  }
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
  WdIncrStyle weight_decay_incr_style = WdIncrStyle::kConstant;
  bool decoupled_weight_decay = true;
  double clip_grad = 1.0;
  distckpt::DType exp_avg_dtype = distckpt::DType::kF32;
  distckpt::DType exp_avg_sq_dtype = distckpt::DType::kF32;
  double lr_warmup_init = 0;
  std::int64_t lr_warmup_steps = -1;  // -1: as the ratio says
  double lr_warmup_steps_ratio = 0;
  LrDecayStyle lr_decay_style = LrDecayStyle::kConstant;
  std::optional<std::int64_t> lr_decay_steps{};  // default: the steps of the run
  std::optional<std::int64_t> lr_wsd_decay_steps{};
  WsdDecayStyle lr_wsd_decay_style = WsdDecayStyle::kExponential;
  bool operator==(const OptimConfig&) const = default;
};

// The steps behind which a run saves or validates.
struct Frequency {
  int steps = -1;                 // between two times; -1: as the kind of run says; 0: never
  bool after_each_epoch = false;  // instead: behind the last step of each
  bool is_regular() const { return after_each_epoch || steps > 0; }
  // True if it comes behind `step`, which is counted from 1.
  bool comes_behind(std::int64_t step, std::int64_t steps_per_epoch) const {
    const auto every = after_each_epoch ? steps_per_epoch : steps;
    return every > 0 && step % every == 0;
  }
  bool operator==(const Frequency&) const = default;
};

struct CheckpointSection {
  Frequency save_freq{};
  std::optional<int> keep_last{};
  std::optional<int> keep_every{};
  bool async_save = false;
  bool save_hf = false;
  ResumeMode resume_mode = ResumeMode::kAuto;
  std::string resume_from_path{};
  bool operator==(const CheckpointSection&) const = default;
};

struct TrainerConfig {
  std::string default_local_dir = "checkpoints";
  DeviceKind device = DeviceKind::kCuda;
  int nccl_timeout = 600;
  std::optional<std::int64_t> total_training_steps{};  // default: those of total_epochs
  int total_epochs = 1;
  std::int64_t seed = 42;
  std::vector<Logger> logger{Logger::kConsole, Logger::kFile};
  std::string project_name = "ferry";
  std::string experiment_name{};  // default: the name of the run's folder
  bool logs_to(Logger destination) const;
  bool val_before_train = false;
  Frequency test_freq{};
  bool operator==(const TrainerConfig&) const = default;
};

struct GlobalProfilerConfig {
  std::optional<ProfilerTool> tool{};
  std::vector<std::int64_t> steps{};
  bool profile_continuous_steps = false;
  std::string save_path = "outputs/profile";
  bool discrete = false;
  bool operator==(const GlobalProfilerConfig&) const = default;
};

// The ranks of a role that are profiled.
struct ProfilerConfig {
  bool enable = false;
  bool all_ranks = false;
  std::vector<int> ranks{};
  bool operator==(const ProfilerConfig&) const = default;
};

// Each opens the section of that name in the table and lists the fields; what a run adds to it
// follows.
void list(ConfigTable& table, std::string section, OptimConfig& c);
void list(ConfigTable& table, std::string section, CheckpointSection& c);
void list(ConfigTable& table, std::string section, TrainerConfig& c);
void list(ConfigTable& table, std::string section, GlobalProfilerConfig& c);
void list(ConfigTable& table, std::string section, ProfilerConfig& c);
void list_model(ConfigTable& table, std::string section, std::string help, ModelConfig& c);
void list_expert_tensor(ConfigTable& table, std::optional<int>& size);  // in the open section
void list_mesh(ConfigTable& table, std::string section, std::string help, EngineConfig& c);

// These go on in the open section: of the model that texts are for, and of an engine that has a
// backward pass. Offloading its parameters and gradients means something else to each run.
void list_tokenizer(ConfigTable& table, ModelConfig& c);
void list_training(ConfigTable& table, EngineConfig& c);
void list_load_balancing(ConfigTable& table, EngineConfig& c);
// The key of a role that learns, wherever verl has it.
void list_vision_tower(ConfigTable& table, EngineConfig& c);

}  // namespace ferry::trainer
