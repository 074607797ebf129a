// The configuration of a run of reinforcement learning, PPO, GRPO and their relatives: sections and
// keys are verl's (verl/trainer/config/ppo_megatron_trainer.yaml); docs/training/configuration.md
// has what they mean, out of the same list that reads them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "trainer/config/agent_sections.h"
#include "trainer/config/async_training.h"
#include "trainer/config/config_value.h"
#include "trainer/config/ppo_choices.h"
#include "trainer/config/run_sections.h"

namespace ferry::trainer {

struct PpoDataConfig {  // data
  std::vector<std::string> train_files{};
  std::vector<std::string> val_files{};
  std::string prompt_key = "prompt";
  std::string image_key = "images";
  ConfigValue::Table apply_chat_template_kwargs{};
  int max_prompt_length = 512;    // tokens
  int max_response_length = 512;  // tokens
  int train_batch_size = 1024;    // prompts
  // Prompts under way, of async_training.partial_rollout; of filter_groups those of a batch that is
  // generated.
  std::optional<int> gen_batch_size{};
  std::optional<int> val_batch_size{};  // default: all of val_files at once
  bool shuffle = true;
  std::int64_t shuffle_buffer_bytes = std::int64_t{256} << 20;
  OnMalformed malformed_rows = OnMalformed::kSkip;
  bool filter_overlong_prompts = false;
  Truncation truncation = Truncation::kError;
  bool operator==(const PpoDataConfig&) const = default;
};

// The cut of a forward pass that learns nothing into micro-batches.
struct LogProbConfig {
  std::optional<bool> log_prob_use_dynamic_bsz{};          // default: the actor's
  std::optional<int> log_prob_max_token_len_per_gpu{};     // default: the actor's
  std::optional<int> log_prob_micro_batch_size_per_gpu{};  // default: the actor's
  bool operator==(const LogProbConfig&) const = default;
};

struct PolicyLossSection {  // actor_rollout_ref.actor.policy_loss
  LossMode loss_mode = LossMode::kVanilla;
  double clip_cov_ratio = 2e-4;
  double clip_cov_lb = 1;
  double clip_cov_ub = 5;
  double kl_cov_ratio = 2e-4;
  double ppo_kl_coef = 0.1;
  bool operator==(const PolicyLossSection&) const = default;
};

struct RouterReplaySection {  // actor_rollout_ref.actor.router_replay
  RouterReplayMode mode = RouterReplayMode::kDisabled;
  bool operator==(const RouterReplaySection&) const = default;
};

struct ActorConfig {              // actor_rollout_ref.actor
  std::vector<int> ranks{};       // of the world; empty: all
  int ppo_mini_batch_size = 256;  // prompts
  bool use_dynamic_bsz = true;
  std::optional<int> ppo_max_token_len_per_gpu{};  // default: auto
  std::optional<int> ppo_micro_batch_size_per_gpu{};
  int ppo_epochs = 1;
  bool shuffle = false;
  std::int64_t data_loader_seed = 42;
  double clip_ratio = 0.2;
  std::optional<double> clip_ratio_low{};   // default: clip_ratio
  std::optional<double> clip_ratio_high{};  // default: clip_ratio
  double clip_ratio_c = 3;
  double tau_pos = 1;
  double tau_neg = 1.05;
  std::optional<LossAggMode> loss_agg_mode{};  // default: token-mean; of gspo seq-mean-token-mean
  std::optional<double> loss_scale_factor{};   // default: max_response_length
  double entropy_coeff = 0;
  bool use_kl_loss = false;
  double kl_loss_coef = 1e-3;
  KlPenalty kl_loss_type{};
  PolicyLossSection policy_loss{};
  // The actor computes old log-probabilities where the rollout has said them.
  std::optional<bool> recompute_old_log_prob{};  // default: auto
  RouterReplaySection router_replay{};
  EngineConfig megatron{};
  OptimConfig optim{.lr = 1e-6};
  ProfilerConfig profiler{};
  bool operator==(const ActorConfig&) const = default;
};

struct RefConfig {  // actor_rollout_ref.ref
  std::vector<int> ranks{};
  LogProbConfig log_prob{};
  EngineConfig megatron{.freeze_vision_tower = true};
  bool operator==(const RefConfig&) const = default;
};

struct ValKwargs {  // actor_rollout_ref.rollout.val_kwargs
  int n = 1;
  bool do_sample = false;  // says nothing, as in verl: temperature does
  double temperature = 0;  // 0: greedy
  std::int64_t top_k = -1;
  double top_p = 1;
  bool operator==(const ValKwargs&) const = default;
};

// Processes that answer beside a rank of the rollout.
struct ReplicaConfig {      // actor_rollout_ref.rollout.replicas
  int num = 0;              // that the rank starts
  bool elastic = false;     // others may join
  int timeout = 60;         // seconds
  int start_timeout = 600;  // seconds
  int max_restarts = 3;     // of each
  // GPUs of a machine that the replicas of its ranks are on, one after the other. Empty: those on
  // which no rank is.
  std::vector<int> devices{};
  bool operator==(const ReplicaConfig&) const = default;

  bool enabled() const { return num > 0 || elastic; }
};

struct RolloutConfig {  // actor_rollout_ref.rollout
  std::vector<int> ranks{};
  int n = 1;  // answers to each prompt
  double temperature = 1;
  std::int64_t top_k = -1;
  double top_p = 1;
  bool ignore_eos = false;
  int tensor_model_parallel_size = 1;
  int expert_parallel_size = 1;
  std::optional<int> expert_tensor_parallel_size{};  // default: tensor_model_parallel_size
  std::optional<double> gpu_memory_utilization{};    // default: auto
  // On the host, and of a replica on a GPU that a rank has.
  std::int64_t kv_cache_bytes = std::int64_t{1} << 30;
  int max_num_batched_tokens = 8192;
  int max_num_seqs = 256;
  bool enable_chunked_prefill = true;
  bool enable_prefix_caching = true;
  bool enforce_eager = false;
  bool free_cache_engine = true;  // the rollout sleeps while the actor trains
  std::int64_t update_weights_bucket_megabytes = 512;
  models::Delta update_weights_delta = models::Delta::kOff;
  bool verify_weights = false;  // digests of every message of a reshard
  LogProbConfig log_prob{};
  ValKwargs val_kwargs{};
  ReplicaConfig replicas{};
  AgentSections agents{};  // of several turns
  bool operator==(const RolloutConfig&) const = default;

  // True if no rank has the whole model.
  bool shares_model() const {
    return tensor_model_parallel_size > 1 || expert_parallel_size > 1 ||
           expert_tensor_parallel_size > 1;
  }
  // One process has the whole model.
  void set_alone() {
    tensor_model_parallel_size = expert_parallel_size = 1;
    expert_tensor_parallel_size.reset();
  }
  // True if tokens are left out of the draw.
  bool truncates() const { return top_k > 0 || top_p < 1; }
};

struct CriticConfig {  // critic
  std::vector<int> ranks{};
  ModelConfig model{};                       // default: the actor's
  std::optional<int> ppo_mini_batch_size{};  // default, and of the seven below: the actor's
  std::optional<bool> use_dynamic_bsz{};
  std::optional<int> ppo_max_token_len_per_gpu{};
  std::optional<int> ppo_micro_batch_size_per_gpu{};
  std::optional<int> ppo_epochs{};
  std::optional<bool> shuffle{};
  std::optional<LossAggMode> loss_agg_mode{};
  std::optional<double> loss_scale_factor{};
  double cliprange_value = 0.5;
  EngineConfig megatron{};
  OptimConfig optim{.lr = 1e-5};
  ProfilerConfig profiler{};
  bool operator==(const CriticConfig&) const = default;
};

struct OverlongBufferConfig {  // reward_model.overlong_buffer
  bool enable = false;
  int len = 0;
  double penalty_factor = 1;
  bool operator==(const OverlongBufferConfig&) const = default;
};

// The worth of answers: by the rule of their data_source, or by a program, and by a model.
struct RewardConfig {   // reward_model
  bool enable = false;  // the model
  std::vector<int> ranks{};
  ModelConfig model{};
  bool use_dynamic_bsz = true;
  std::optional<int> max_token_len_per_gpu{};
  std::optional<int> micro_batch_size_per_gpu{};
  EngineConfig megatron{.freeze_vision_tower = true};
  std::string command{};  // a program that scores, instead of the rules: docs/training/rewards.md
  int command_timeout = 60;         // seconds
  int command_start_timeout = 300;  // of its first answer
  int command_max_restarts = 2;
  int num_workers = 1;  // processes of the program

  // True if an answer is scored when it is complete, not when all are.
  bool scores_early() const { return !command.empty() && num_workers > 1; }
  std::string format_pattern{};  // an answer of this form gets format_score on top
  double format_score = 0.1;
  OverlongBufferConfig overlong_buffer{};
  bool operator==(const RewardConfig&) const = default;
};

struct KlCtrlConfig {  // algorithm.kl_ctrl
  KlCtrlType type = KlCtrlType::kFixed;
  double kl_coef = 1e-3;
  double horizon = 10000;  // adaptive; sequences
  double target_kl = 0.1;  // adaptive
  bool operator==(const KlCtrlConfig&) const = default;
};

struct FilterGroupsConfig {  // algorithm.filter_groups: DAPO's dynamic sampling
  bool enable = false;
  std::string metric = "reward";
  int max_num_gen_batches = 10;
  bool operator==(const FilterGroupsConfig&) const = default;
};

// Bounds of an importance weight or a rejection, written "2.0" or "0.5_2.0".
struct ThresholdBounds {
  std::optional<double> lower{};
  double upper = 2;
  bool operator==(const ThresholdBounds&) const = default;
};

// A criterion of rejection and its bounds: of weights where it is of k1, else of k2 or k3.
struct RejectionRule {
  RejectionOption option{};
  ThresholdBounds bounds{};
};

struct RolloutCorrectionSection {  // algorithm.rollout_correction
  RolloutIs rollout_is = RolloutIs::kNone;
  // Without a lower bound: at most so much (TIS, F. Yao et al., "Your efficient RL framework
  // secretly brings you off-policy RL training", 2025); with one: 0 outside (IcePop, Ling team,
  // 2025).
  ThresholdBounds rollout_is_threshold{};
  bool rollout_is_batch_normalize = false;  // divided by their mean
  // One of these suffices to reject.
  std::vector<RejectionOption> rollout_rs{};
  // One for all, or one for each: for k1 between whose logarithms it must be, of which "2.0" is
  // "0.5_2.0"; for others, which must not exceed it, without a lower bound.
  std::vector<ThresholdBounds> rollout_rs_threshold{};
  bool bypass_mode = false;  // old log-probabilities are the rollout's
  BypassLoss loss_type = BypassLoss::kPpoClip;
  bool operator==(const RolloutCorrectionSection&) const = default;

  std::vector<RejectionOption> rejection_options() const;  // each once
  // Each option beside its bounds; of a configuration whose rules hold.
  std::vector<RejectionRule> rejection_rules() const;
};

struct GigpoSection {  // algorithm.gigpo
  double step_advantage_w = 1;
  GigpoMode mode = GigpoMode::kMeanNorm;
  bool operator==(const GigpoSection&) const = default;
};

struct AlgorithmConfig {  // algorithm
  AdvantageEstimator adv_estimator = AdvantageEstimator::kGae;
  double gamma = 1;
  double lam = 1;
  // false: without division by std, which is Dr. GRPO (Z. Liu et al., arXiv:2503.20783).
  bool norm_adv_by_std_in_grpo = true;
  GigpoSection gigpo{};
  bool use_kl_in_reward = false;
  KlPenalty kl_penalty{.estimator = KlEstimator::kKl};
  KlCtrlConfig kl_ctrl{};
  RolloutCorrectionSection rollout_correction{};
  FilterGroupsConfig filter_groups{};
  bool operator==(const AlgorithmConfig&) const = default;
};

void list(ConfigTable& table, AlgorithmConfig& c);

struct PpoTrainerConfig {  // trainer, and what all runs have
  TrainerConfig run{};
  int worker_timeout = 14400;  // seconds
  int critic_warmup = 0;       // first step, from 1, in which the actor learns
  bool balance_batch = true;
  std::string rollout_data_dir{};     // a folder of samples, JSONL; empty: rollouts/ in the run's
  std::string validation_data_dir{};  // the same of validation
  bool log_samples = true;
  bool val_only = false;
  bool one_step_off = false;  // answers are generated while the step before them trains
  bool operator==(const PpoTrainerConfig&) const = default;
};

// The cut of a step's answers into updates.
struct MiniBatches {
  std::int64_t size = 0;  // answers, of all data parallel ranks
  int epochs = 1;         // times that each answer is learned from
  bool shuffle = false;   // each time in another order
  bool operator==(const MiniBatches&) const = default;
};

// The way from the losses of tokens to one (algorithms/agg_loss.h).
struct LossAggregation {
  LossAggMode loss_agg_mode = LossAggMode::kTokenMean;
  double loss_scale_factor = 0;
  bool operator==(const LossAggregation&) const = default;
};

struct PpoConfig {
  PpoDataConfig data{};
  ModelConfig model{};  // actor_rollout_ref.model
  ActorConfig actor{};
  RefConfig ref{};
  RolloutConfig rollout{};
  CriticConfig critic{};
  RewardConfig reward{};
  AlgorithmConfig algorithm{};
  PpoTrainerConfig trainer{};
  AsyncTrainingConfig async_training{};
  CheckpointSection checkpoint{};
  GlobalProfilerConfig global_profiler{};
  bool operator==(const PpoConfig&) const = default;

  bool use_critic() const { return algorithm.adv_estimator == AdvantageEstimator::kGae; }
  bool use_reference_policy() const { return actor.use_kl_loss || algorithm.use_kl_in_reward; }
  // True if the rollout answers while the actor learns, or keeps its weights for several steps.
  bool is_async() const;
  // Batches that may be answered before the one that learns is.
  std::int64_t batches_ahead() const;
  // The most updates that weights which drew a token are behind those that learn from it.
  std::int64_t max_staleness() const;
  // True if the rollout's log-probabilities and entropies are the bytes that the actor would
  // compute.
  bool rollout_says_old_log_prob() const;
  // True if the actor takes them instead.
  bool takes_old_log_prob() const;

  models::ParallelConfig rollout_parallel() const;
  // True if the rollout computes with the actor's own memory.
  bool rollout_shares_memory() const;

  // The settings of each role; those that it does not have are the actor's.
  MiniBatches actor_mini_batches() const;
  MiniBatches critic_mini_batches() const;
  LossAggregation actor_loss_aggregation() const;
  LossAggregation critic_loss_aggregation() const;
  MicroBatchSize actor_micro_batches() const;
  MicroBatchSize log_prob_micro_batches(const LogProbConfig& role) const;  // of ref and rollout
  MicroBatchSize critic_micro_batches() const;
  MicroBatchSize reward_micro_batches() const;  // its own alone
  std::int64_t longest_sequence() const {       // tokens
    return std::int64_t{data.max_prompt_length} + data.max_response_length;
  }
};

// Defaults of `ferry train ppo`, or of `ferry train grpo`: adv_estimator grpo, and n = 8 answers.
PpoConfig default_ppo_config(std::string_view algorithm);

// Reads the file over the defaults of that algorithm, then the overrides, in their order. Each
// key that a role's megatron section leaves out is the actor's, if it means something there.
// Throws Error(kUsage) as load_sft_config() does.
PpoConfig load_ppo_config(std::string_view algorithm,
                          const std::filesystem::path& file,
                          const std::vector<std::string>& overrides,
                          std::vector<std::string>* notes = nullptr);

std::string to_toml(const PpoConfig& config);
ConfigValues values_of(const PpoConfig& config);

std::string ppo_config_reference();

}  // namespace ferry::trainer
