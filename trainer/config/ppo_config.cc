#include "trainer/config/ppo_config.h"

#include <utility>

#include "distckpt/base/error.h"
#include "trainer/config/config_table.h"
#include "trainer/config/ppo_rules.h"

namespace ferry::trainer {

namespace {

const std::string kActorModel = "actor_rollout_ref.model";
constexpr const char* kParamOffloadHelp =
    "keep parameters on the host while other roles work; auto: where the run does not fit "
    "otherwise, or is faster";
constexpr const char* kTokensHelp =
    "tokens of a micro-batch per context parallel rank; auto: what fits, up to 16384 or what the "
    "longest prompt and answer need";

void list_ranks(ConfigTable& table, std::vector<int>& ranks) {
  table.add("ranks", ranks, "ranks of the run that have this role; empty: all", at_least(0));
}

void list(ConfigTable& table, PpoDataConfig& c) {
  table.section("data", "Prompts (docs/training/data.md) and how they become batches");
  table.add_path("train_files", c.train_files, "files of records: .jsonl, .parquet");
  table.add_path("val_files", c.val_files, "files of records for validation: .jsonl, .parquet");
  table.add("prompt_key", c.prompt_key, "the column of prompts: text, or a conversation");
  table.add("image_key", c.image_key, "the column of images, for models that also see");
  table.add("apply_chat_template_kwargs", c.apply_chat_template_kwargs,
            "variables of the chat template: apply_chat_template_kwargs.enable_thinking=false");
  table.add("max_prompt_length", c.max_prompt_length, "tokens of a prompt", at_least(1));
  table.add("max_response_length", c.max_response_length, "tokens of an answer", at_least(1));
  table.add("train_batch_size", c.train_batch_size, "prompts of a step", at_least(1));
  table.add(
      "gen_batch_size", c.gen_batch_size,
      "for filter_groups: prompts of a batch that is generated; not set: train_batch_size; for "
      "partial_rollout: prompts under way",
      at_least(1));
  table.add("val_batch_size", c.val_batch_size, "prompts validated at a time; not set: all",
            at_least(1));
  table.add("shuffle", c.shuffle, "permute the records of each epoch, by trainer.seed");
  table.add("shuffle_buffer_bytes", c.shuffle_buffer_bytes,
            "bytes of records that are in memory and shuffled at a time", at_least(0));
  table.add("malformed_rows", c.malformed_rows,
            "skip: skip and count malformed rows; fail: stop at the first one");
  table.add("filter_overlong_prompts", c.filter_overlong_prompts,
            "leave out and count longer prompts");
  table.add("truncation", c.truncation,
            "prompts that are too long and not filtered: an error, or lose tokens at the left or "
            "right end, or in the middle");
}

std::string mesh_help(bool follows_actor) {
  return fmt::format("The mesh of its ranks, and time traded for memory{}",
                     follows_actor ? "; a key that is not set has the actor's value" : "");
}

void list_trained(ConfigTable& table,
                  const std::string& role,
                  bool follows_actor,
                  EngineConfig& engine,
                  OptimConfig& optim,
                  ProfilerConfig& profiler) {
  list_mesh(table, role + ".megatron", mesh_help(follows_actor), engine);
  list_training(table, engine);
  list_load_balancing(table, engine);
  table.add_auto("param_offload", engine.param_offload, kParamOffloadHelp);
  table.add_auto("grad_offload", engine.grad_offload,
                 "give the gradients' memory away while this role does not train; auto: where the "
                 "run does not fit otherwise, or is faster");
  list(table, role + ".optim", optim);
  list(table, role + ".profiler", profiler);
}

void list_forward_only(ConfigTable& table, const std::string& role, EngineConfig& engine) {
  list_mesh(table, role + ".megatron", mesh_help(true), engine);
  table.add_auto("param_offload", engine.param_offload, kParamOffloadHelp);
}

void list(ConfigTable& table, ActorConfig& c) {
  table.section(kActorSection, "The policy that learns");
  list_ranks(table, c.ranks);
  table.add("ppo_mini_batch_size", c.ppo_mini_batch_size,
            "prompts of an update, each with all its answers", at_least(1));
  table.add("use_dynamic_bsz", c.use_dynamic_bsz,
            "pack micro-batches up to a number of tokens, not of sequences");
  table.add_auto("ppo_max_token_len_per_gpu", c.ppo_max_token_len_per_gpu, kTokensHelp,
                 at_least(1));
  table.add("ppo_micro_batch_size_per_gpu", c.ppo_micro_batch_size_per_gpu,
            "sequences of a micro-batch, without use_dynamic_bsz", at_least(1));
  table.add("ppo_epochs", c.ppo_epochs, "passes over the answers of a step", at_least(1));
  table.add("shuffle", c.shuffle, "permute the answers in each pass");
  table.add("data_loader_seed", c.data_loader_seed, "seed of these permutations", at_least(0));
  table.add("clip_ratio", c.clip_ratio, "clipping range of the ratio of probabilities around 1",
            at_least(0));
  table.add("clip_ratio_low", c.clip_ratio_low, "clipping range below 1; not set: clip_ratio",
            at_least(0));
  table.add("clip_ratio_high", c.clip_ratio_high, "clipping range above 1; not set: clip_ratio",
            at_least(0));
  table.add("clip_ratio_c", c.clip_ratio_c,
            "for vanilla: bound of the ratio for negative advantages (dual clip)", above(1));
  table.add("tau_pos", c.tau_pos, "for sapo: temperature of positive advantages", above(0));
  table.add("tau_neg", c.tau_neg, "for sapo: temperature of other advantages", above(0));
  table.add("loss_agg_mode", c.loss_agg_mode,
            "aggregation of token losses; not set: token-mean, for gspo seq-mean-token-mean");
  table.add("loss_scale_factor", c.loss_scale_factor,
            "for seq-mean-token-sum-norm: divisor of the sums; not set: max_response_length",
            above(0));
  table.add("entropy_coeff", c.entropy_coeff, "coefficient of the entropy bonus");
  table.add("use_kl_loss", c.use_kl_loss, "add the divergence from the reference to the loss");
  table.add("kl_loss_coef", c.kl_loss_coef, "coefficient of that divergence", at_least(0));
  table.add("kl_loss_type", c.kl_loss_type,
            "estimator of that divergence; +: with the gradient of k2");
  table.add_auto(
      "recompute_old_log_prob", c.recompute_old_log_prob,
      "true: the actor computes old_log_prob; false: take the rollout's, which needs a synchronous "
      "bitwise run, where they are the same bytes; auto: take the rollout's in such a run");
  list_vision_tower(table, c.megatron);
  auto& loss = c.policy_loss;
  table.section(kActorSection + ".policy_loss", "The loss of the policy");
  table.add("loss_mode", loss.loss_mode, "loss of the policy");
  table.add("clip_cov_ratio", loss.clip_cov_ratio,
            "for clip_cov: share of tokens that are left out", from_to(0, 1));
  table.add("clip_cov_lb", loss.clip_cov_lb, "for clip_cov: lower bound of their covariance");
  table.add("clip_cov_ub", loss.clip_cov_ub, "for clip_cov: upper bound of their covariance");
  table.add("kl_cov_ratio", loss.kl_cov_ratio, "for kl_cov: share of tokens that are penalised",
            from_to(0, 1));
  table.add("ppo_kl_coef", loss.ppo_kl_coef, "for kl_cov: coefficient of the penalty", at_least(0));
  table.section(kActorSection + ".router_replay",
                "The experts to which the tokens of an update go");
  table.add("mode", c.router_replay.mode,
            "disabled: the routers choose; R2: as in the pass that computed old_log_prob; R3: as "
            "in the rollout, in old_log_prob as well");
  list_trained(table, kActorSection, false, c.megatron, c.optim, c.profiler);
}

void list(ConfigTable& table, LogProbConfig& c) {
  table.add("log_prob_use_dynamic_bsz", c.log_prob_use_dynamic_bsz,
            "use_dynamic_bsz of log-probabilities; not set: the actor's");
  table.add("log_prob_max_token_len_per_gpu", c.log_prob_max_token_len_per_gpu,
            "ppo_max_token_len_per_gpu of log-probabilities; not set: the actor's", at_least(1));
  table.add("log_prob_micro_batch_size_per_gpu", c.log_prob_micro_batch_size_per_gpu,
            "ppo_micro_batch_size_per_gpu of log-probabilities; not set: the actor's", at_least(1));
}

void list(ConfigTable& table, RefConfig& c) {
  table.section(kRefSection, "The initial policy, if a KL term needs it");
  list_ranks(table, c.ranks);
  list(table, c.log_prob);
  list_forward_only(table, kRefSection, c.megatron);
}

void list(ConfigTable& table, RolloutConfig& c) {
  table.section(kRolloutSection, "Generation, with the actor's alignment and dtype");
  list_ranks(table, c.ranks);
  table.add("n", c.n, "answers to each prompt; ferry train grpo starts from 8", at_least(1));
  table.add("temperature", c.temperature, "temperature of the draw, and of all log-probabilities",
            above(0));
  table.add("top_k", c.top_k, "tokens to draw from; -1: all", at_least(-1));
  table.add("top_p", c.top_p, "probability of the tokens to draw from", above_to(0, 1));
  table.add("ignore_eos", c.ignore_eos, "continue answers to max_response_length");
  table.add("tensor_model_parallel_size", c.tensor_model_parallel_size,
            "ranks that share each layer", at_least(1));
  table.add("expert_parallel_size", c.expert_parallel_size, "ranks that share the experts",
            at_least(1));
  list_expert_tensor(table, c.expert_tensor_parallel_size);
  table.add_auto(
      "gpu_memory_utilization", c.gpu_memory_utilization,
      "share of a GPU's memory, free when generation starts, that it may fill; auto: what "
      "the other roles leave",
      above_to(0, 1));
  table.add("kv_cache_bytes", c.kv_cache_bytes,
            "bytes of the KV cache on the host, and of a replica's on a GPU that a rank has",
            at_least(1));
  table.add("max_num_batched_tokens", c.max_num_batched_tokens, "tokens of a forward pass",
            at_least(1));
  table.add("max_num_seqs", c.max_num_seqs, "sequences of a forward pass", at_least(1));
  table.add("enable_chunked_prefill", c.enable_chunked_prefill,
            "compute a long prompt in several passes");
  table.add("enable_prefix_caching", c.enable_prefix_caching,
            "share keys, values and states of prompts that begin alike");
  table.add("enforce_eager", c.enforce_eager, "use no CUDA graphs");
  table.add("free_cache_engine", c.free_cache_engine, "free the KV cache while other roles work");
  list(table, c.log_prob);
  table.section(kRolloutSection + ".checkpoint_engine", "The transfer of the actor's weights");
  table.add("update_weights_bucket_megabytes", c.update_weights_bucket_megabytes,
            "MiB of a bucket of weights", at_least(1));
  table.add(
      "update_weights_delta", c.update_weights_delta,
      "send only changed weights; the sender keeps its last messages on the device or the host");
  table.add("verify_weights", c.verify_weights, "compare every message by digest");
  list(table, c.replicas);
  auto& val = c.val_kwargs;
  table.section(kRolloutSection + ".val_kwargs", "Generation in validation");
  table.add("n", val.n, "answers to each prompt", at_least(1));
  table.add("do_sample", val.do_sample, "says nothing, as in verl: temperature does");
  table.add("temperature", val.temperature, "temperature of the draw; 0: take the likeliest token",
            at_least(0));
  table.add("top_k", val.top_k, "tokens to draw from; -1: all", at_least(-1));
  table.add("top_p", val.top_p, "probability of the tokens to draw from", above_to(0, 1));
  list(table, kRolloutSection, c.agents);
}

void list(ConfigTable& table, CriticConfig& c) {
  table.section("critic", "The critic, for gae");
  list_ranks(table, c.ranks);
  table.add("ppo_mini_batch_size", c.ppo_mini_batch_size,
            "prompts of an update, each with all its answers; not set: the actor's", at_least(1));
  table.add("use_dynamic_bsz", c.use_dynamic_bsz, "not set: the actor's");
  table.add("ppo_max_token_len_per_gpu", c.ppo_max_token_len_per_gpu,
            "not set: the actor's, or, if that is auto, what fits", at_least(1));
  table.add("ppo_micro_batch_size_per_gpu", c.ppo_micro_batch_size_per_gpu, "not set: the actor's",
            at_least(1));
  table.add("ppo_epochs", c.ppo_epochs, "not set: the actor's", at_least(1));
  table.add("shuffle", c.shuffle, "not set: the actor's");
  table.add("cliprange_value", c.cliprange_value, "clipping range of a value around its old value",
            at_least(0));
  table.add("loss_agg_mode", c.loss_agg_mode, "not set: the actor's");
  table.add("loss_scale_factor", c.loss_scale_factor, "not set: the actor's", above(0));
  list_vision_tower(table, c.megatron);
  list_model(table, "critic.model",
             "The model that the critic starts from; without path, " + kActorModel, c.model);
  list_trained(table, "critic", true, c.megatron, c.optim, c.profiler);
}

void list(ConfigTable& table, RewardConfig& c) {
  table.section("reward_model",
                "The reward of answers (docs/training/rewards.md): by rule, program or model");
  table.add("enable", c.enable, "a reward model scores");
  list_ranks(table, c.ranks);
  table.add("use_dynamic_bsz", c.use_dynamic_bsz,
            "pack its micro-batches up to a number of tokens, not of sequences");
  table.add_auto("max_token_len_per_gpu", c.max_token_len_per_gpu, kTokensHelp, at_least(1));
  table.add("micro_batch_size_per_gpu", c.micro_batch_size_per_gpu,
            "sequences of a micro-batch, without use_dynamic_bsz", at_least(1));
  table.add("command", c.command, "a program with its arguments that scores instead of the rules");
  table.add("command_timeout", c.command_timeout, "seconds that the program may take for an answer",
            at_least(1));
  table.add("command_start_timeout", c.command_start_timeout,
            "seconds that its first answer may take after each start", at_least(1));
  table.add("command_max_restarts", c.command_max_restarts,
            "restarts in a row before the run stops", at_least(0));
  table.add("num_workers", c.num_workers, "processes of the program; several score early",
            at_least(1));
  table.add("format_pattern", c.format_pattern,
            "regular expression; answers that match get format_score on top");
  table.add("format_score", c.format_score, "score of answers that match format_pattern");
  auto& overlong = c.overlong_buffer;
  table.section("reward_model.overlong_buffer",
                "DAPO's penalty for answers that come near max_response_length");
  table.add("enable", overlong.enable, "apply the penalty");
  table.add("len", overlong.len, "number of last tokens that are penalised", at_least(0));
  table.add("penalty_factor", overlong.penalty_factor, "the penalty of the longest answer",
            at_least(0));
  list_model(table, "reward_model.model", "The model that scores, with a value head", c.model);
  list_forward_only(table, "reward_model", c.megatron);
}

void list(ConfigTable& table, PpoTrainerConfig& c) {
  list(table, "trainer", c.run);
  table.add(
      "worker_timeout", c.worker_timeout,
      "seconds after which the run ends if no rank has been called by rank 0 or has answered it",
      at_least(1));
  table.add("critic_warmup", c.critic_warmup,
            "first step, counted from 1, in which the actor learns, too; 0 means the same as 1",
            at_least(0));
  table.add("balance_batch", c.balance_batch, "give ranks about the same number of tokens");
  table.add("log_samples", c.log_samples, "write prompts, answers and scores");
  table.add_path("rollout_data_dir", c.rollout_data_dir,
                 "folder of these files, JSON lines; empty: rollouts in default_local_dir");
  table.add_path("validation_data_dir", c.validation_data_dir,
                 "folder of these files of validation; empty: validations in default_local_dir");
  table.add("val_only", c.val_only, "validate the model, or the newest checkpoint, and end");
  table.add("one_step_off", c.one_step_off, "generate answers while the step before them trains");
}

ConfigTable table_of(PpoConfig& config) {
  ConfigTable table;
  list(table, config.data);
  list_model(table, kActorModel, "The model that training starts from", config.model);
  list_tokenizer(table, config.model);
  list(table, config.actor);
  list(table, config.ref);
  list(table, config.rollout);
  list(table, config.critic);
  list(table, config.reward);
  list(table, config.algorithm);
  list(table, "checkpoint", config.checkpoint);
  list(table, config.trainer);
  list(table, config.async_training);
  list(table, "global_profiler", config.global_profiler);
  return table;
}

bool cuts_stages(std::string_view name) {
  return name.starts_with("virtual_") || name.starts_with("num_layers_in_") ||
         name.starts_with("account_for_") || name == "pipeline_model_parallel_layout";
}

// Gives a role the keys of the actor's engine that it leaves out (verl's interpolations of
// ref.megatron), unless it decides otherwise what they belong to: a layout is of a number of
// stages, layers are recomputed at a granularity.
void inherit_engine(ConfigTable& table,
                    const std::string& role,
                    const EngineConfig& actor,
                    const EngineConfig& engine) {
  const auto inherit = [&](const auto& takes) {
    table.inherit(role + ".megatron", kActorSection + ".megatron", takes);
  };
  inherit([](std::string_view name) {
    return name == "tensor_model_parallel_size" || name == "pipeline_model_parallel_size" ||
           name == "recompute_granularity";
  });
  inherit([&](std::string_view name) {
    if (cuts_stages(name))
      return engine.parallel.pipeline_model_parallel_size ==
             actor.parallel.pipeline_model_parallel_size;
    if (name.starts_with("moe_")) return false;  // of how the actor learns
    return !name.starts_with("recompute_") ||
           engine.recompute_granularity == actor.recompute_granularity;
  });
}

// A role's own sizes of micro-batches, else the actor's where these are of the same kind.
MicroBatchSize over_actor(const MicroBatchSize& actor,
                          std::optional<bool> use_dynamic_bsz,
                          std::optional<int> max_token_len_per_gpu,
                          std::optional<int> micro_batch_size_per_gpu) {
  MicroBatchSize size{.use_dynamic_bsz = use_dynamic_bsz.value_or(actor.use_dynamic_bsz),
                      .max_token_len_per_gpu = max_token_len_per_gpu,
                      .micro_batch_size_per_gpu = micro_batch_size_per_gpu};
  if (size.use_dynamic_bsz && !max_token_len_per_gpu)
    size.max_token_len_per_gpu = actor.max_token_len_per_gpu;
  if (!size.use_dynamic_bsz && !micro_batch_size_per_gpu)
    size.micro_batch_size_per_gpu = actor.micro_batch_size_per_gpu;
  return size;
}

}  // namespace

MiniBatches PpoConfig::actor_mini_batches() const {
  return {.size = std::int64_t{actor.ppo_mini_batch_size} * rollout.n,
          .epochs = actor.ppo_epochs,
          .shuffle = actor.shuffle};
}

MiniBatches PpoConfig::critic_mini_batches() const {
  const auto prompts = critic.ppo_mini_batch_size.value_or(actor.ppo_mini_batch_size);
  return {.size = std::int64_t{prompts} * rollout.n,
          .epochs = critic.ppo_epochs.value_or(actor.ppo_epochs),
          .shuffle = critic.shuffle.value_or(actor.shuffle)};
}

LossAggregation PpoConfig::actor_loss_aggregation() const {
  const auto usual = actor.policy_loss.loss_mode == LossMode::kGspo ? LossAggMode::kSeqMeanTokenMean
                                                                    : LossAggMode::kTokenMean;
  return {.loss_agg_mode = actor.loss_agg_mode.value_or(usual),
          .loss_scale_factor = actor.loss_scale_factor.value_or(data.max_response_length)};
}

LossAggregation PpoConfig::critic_loss_aggregation() const {
  const auto of_actor = actor_loss_aggregation();
  return {.loss_agg_mode = critic.loss_agg_mode.value_or(of_actor.loss_agg_mode),
          .loss_scale_factor = critic.loss_scale_factor.value_or(of_actor.loss_scale_factor)};
}

bool PpoConfig::rollout_says_old_log_prob() const {
  return actor.megatron.alignment == models::Alignment::kBitwise && !is_async() &&
         actor.router_replay.mode != RouterReplayMode::kR2;
}

bool PpoConfig::takes_old_log_prob() const {
  return rollout_says_old_log_prob() && !algorithm.rollout_correction.bypass_mode &&
         !actor.recompute_old_log_prob.value_or(false);
}

models::ParallelConfig PpoConfig::rollout_parallel() const {
  return {.tensor_model_parallel_size = rollout.tensor_model_parallel_size,
          .expert_model_parallel_size = rollout.expert_parallel_size,
          .expert_tensor_parallel_size = rollout.expert_tensor_parallel_size,
          .make_vocab_size_divisible_by = actor.megatron.parallel.make_vocab_size_divisible_by};
}

bool PpoConfig::rollout_shares_memory() const {
  const auto& p = actor.megatron.parallel;
  return actor.ranks == rollout.ranks &&
         p.tensor_model_parallel_size == rollout.tensor_model_parallel_size &&
         p.expert_model_parallel_size == rollout.expert_parallel_size &&
         p.expert_tensor_parallel() == rollout_parallel().expert_tensor_parallel() &&
         p.pipeline_model_parallel_size == 1 && p.context_parallel_size == 1 &&
         !actor.megatron.uses_sequence_parallel();
}

MicroBatchSize PpoConfig::actor_micro_batches() const {
  return {.use_dynamic_bsz = actor.use_dynamic_bsz,
          .max_token_len_per_gpu = actor.ppo_max_token_len_per_gpu,
          .micro_batch_size_per_gpu = actor.ppo_micro_batch_size_per_gpu};
}

MicroBatchSize PpoConfig::log_prob_micro_batches(const LogProbConfig& role) const {
  return over_actor(actor_micro_batches(), role.log_prob_use_dynamic_bsz,
                    role.log_prob_max_token_len_per_gpu, role.log_prob_micro_batch_size_per_gpu);
}

MicroBatchSize PpoConfig::critic_micro_batches() const {
  return over_actor(actor_micro_batches(), critic.use_dynamic_bsz, critic.ppo_max_token_len_per_gpu,
                    critic.ppo_micro_batch_size_per_gpu);
}

MicroBatchSize PpoConfig::reward_micro_batches() const {
  return {.use_dynamic_bsz = reward.use_dynamic_bsz,
          .max_token_len_per_gpu = reward.max_token_len_per_gpu,
          .micro_batch_size_per_gpu = reward.micro_batch_size_per_gpu};
}

PpoConfig default_ppo_config(std::string_view algorithm) {
  require(algorithm == "ppo" || algorithm == "grpo", ErrorKind::kBug, "{}: is neither ppo nor grpo",
          algorithm);
  PpoConfig config;
  if (algorithm == "grpo") {
    config.algorithm.adv_estimator = AdvantageEstimator::kGrpo;
    config.rollout.n = 8;
  }
  return config;
}

PpoConfig load_ppo_config(std::string_view algorithm,
                          const std::filesystem::path& file,
                          const std::vector<std::string>& overrides,
                          std::vector<std::string>* notes) {
  auto config = default_ppo_config(algorithm);
  auto table = table_of(config);
  table.set_all(read_entries(file, overrides));
  inherit_engine(table, kRefSection, config.actor.megatron, config.ref.megatron);
  inherit_engine(table, "critic", config.actor.megatron, config.critic.megatron);
  inherit_engine(table, "reward_model", config.actor.megatron, config.reward.megatron);
  require_consistent(config, ppo_rules(), table);
  auto found = find_ineffective(config, ineffective_in_ppo(), table);
  if (notes != nullptr) *notes = std::move(found);
  return config;
}

std::string to_toml(const PpoConfig& config) {
  auto copy = config;
  auto table = table_of(copy);
  for (const auto& role : {kRefSection, std::string("critic"), std::string("reward_model")})
    table.write_unset(role + ".megatron", kActorSection + ".megatron");
  return table.toml();
}

ConfigValues values_of(const PpoConfig& config) {
  auto copy = config;
  return table_of(copy).values();
}

std::string ppo_config_reference() {
  PpoConfig defaults;
  return table_of(defaults).markdown();
}

}  // namespace ferry::trainer
