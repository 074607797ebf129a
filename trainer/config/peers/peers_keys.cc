#include "trainer/config/peers/peers_keys.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

namespace ferry::trainer {
namespace {

struct PeersKey {
  std::string_view name{};  // what a key ends with, or, before a *, what its end begins with
  // The key here, behind what stands before `name` or by itself; *: what is behind `name`.
  std::string_view other{};
  std::string_view says{};
};

constexpr std::string_view kMeshes =
    "ranks share a model as Megatron-Core does it: *_parallel_size, sequence_parallel";
constexpr std::string_view kPacked = "sequences are always packed, without padding";
constexpr std::string_view kLauncher =
    "the launcher says how many ranks there are: torchrun, Slurm, mpirun "
    "(docs/training/clusters.md)";
constexpr std::string_view kFewer = "name a file of fewer records, or trainer.total_training_steps";
constexpr std::string_view kReaders = "ranks read records themselves, in time with the steps";
constexpr std::string_view kAdapters =
    "adapters are not trained; ferry merge puts one into a checkpoint (docs/merging.md)";
constexpr std::string_view kWhole =
    "a checkpoint has all that a run needs to go on; checkpoint.save_hf adds Hugging Face files";
constexpr std::string_view kKernels = "kernels are Ferry's own, compiled with it";
constexpr std::string_view kPerRank = "of all ranks in verl, here of each";
constexpr std::string_view kMessages = "programs always get the messages of a prompt";
constexpr std::string_view kEngine = "Ferry's own engine generates";
constexpr std::string_view kPrograms = "a program scores (docs/training/rewards.md)";
constexpr std::string_view kAbsent = "it is verl's, and not implemented (docs/training/grpo.md)";
constexpr std::string_view kShape = "a model has the shape that its checkpoint says";
constexpr std::string_view kOneTrainer = "there is one trainer";
constexpr std::string_view kInPlace = "files are read where they lie";
constexpr std::string_view kDecoding = "answers are drawn by temperature, top_k and top_p alone";

constexpr PeersKey kPeersKeys[] = {
    {"data.pad_mode", "", kPacked},
    {"use_remove_padding", "", kPacked},
    {"data.train_max_samples", "", kFewer},
    {"data.val_max_samples", "", kFewer},
    {"data.num_workers", "", kReaders},
    {"data.dataloader_num_workers", "", kReaders},
    {"data.custom_cls*", "", "records have verl's columns (docs/training/data.md), without Python"},
    {"data.tokenizer", "model.tokenizer_path", ""},
    {"data.tokenizer", "actor_rollout_ref.model.tokenizer_path", ""},
    {"data.sampler*", "data.shuffle", "the order is computed (docs/training/data.md)"},
    {"data.validation_shuffle", "", "validation takes records in the order of their files"},
    {"data.video_key", "", "models see images alone"},
    {"data.image_patch_size", "", "the model's files say how it reads images"},
    {"data.return_multi_modal_inputs", "", "images are decoded where they are needed"},
    {"use_shm", "", kInPlace},
    {"data.multiturn*", "data.messages_key", "conversations are always turns"},
    {"data.ignore_input_ids_mismatch", "",
     "the text of a whole conversation is what is learned; a template that says its beginning "
     "otherwise is refused"},
    {"model.partial_pretrain", "model.path", ""},
    {"model.lora*", "", kAdapters},
    {"model.target_modules", "", kAdapters},
    {"model.exclude_modules", "", kAdapters},
    {"model.mtp*", "", "layers that predict further tokens are not trained"},
    {"model.trust_remote_code", "", "no code of a checkpoint's is run"},
    {"model.custom_chat_template", "model.tokenizer_path",
     "a folder with another chat_template.jinja"},
    {"data.trust_remote_code", "", "no code of a checkpoint's is run"},
    {"critic.model.enable_gradient_checkpointing", "critic.megatron.recompute_granularity",
     "full is whole layers"},
    {"model.enable_gradient_checkpointing", "engine.recompute_granularity", "full is whole layers"},
    {"model.enable_gradient_checkpointing", "actor.megatron.recompute_granularity",
     "full is whole layers"},
    {"optim.betas", "optim.adam_beta1", "its second number is adam_beta2"},
    {"optim.grad_clip", "optim.clip_grad", ""},
    {"actor.grad_clip", "actor.optim.clip_grad", ""},
    {"critic.grad_clip", "critic.optim.clip_grad", ""},
    {"optim.lr_scheduler_type", "optim.lr_decay_style", ""},
    {"optim.warmup_style", "optim.lr_decay_style", ""},
    {"optim.min_lr_ratio", "optim.min_lr", "a rate, not a share of lr"},
    {"optim.total_training_steps", "trainer.total_training_steps", ""},
    {"optim.main_grads_dtype", "engine.grad_reduce_in_fp32", "false: in engine.dtype"},
    {"optim.main_grads_dtype", "megatron.grad_reduce_in_fp32", "false: in dtype"},
    {"optim.use_precision_aware_optimizer", "optim.exp_avg_dtype",
     "it and exp_avg_sq_dtype are taken as they are"},
    {"optim.optimizer", "", "Adam is the one optimizer"},
    {"optim.muon*", "", "Adam is the one optimizer"},
    {"optim.override_optimizer_config*", "", "keys of optim are set by their names"},
    {"engine.param_offload", "engine.optimizer_offload",
     "each step needs the parameters; masters and moments may be elsewhere"},
    {"override_transformer_config.*", "*", "Megatron-Core's keys stand in the section itself"},
    {"override_transformer_config*", "",
     "keys of Megatron-Core that Ferry has stand in the section itself; kernels are Ferry's own"},
    {"override_ddp_config*", "megatron.grad_reduce_in_fp32", "gradients are reduced in one way"},
    {"override_mcore_model_config*", "", kShape},
    {"override_config*", "", kShape},
    {"external_lib", "", "no code of Python's is run"},
    {"megatron.router_replay.mode", "router_replay.mode", ""},
    {"entropy_from_logits*", "", kKernels},
    {"entropy_checkpointing", "", kKernels},
    {"hybrid_engine", "", "roles share all ranks unless ranks of a role say otherwise"},
    {"strategy", "", kMeshes},
    {"fsdp*", "", kMeshes},
    {"ulysses*", "", kMeshes},
    {"checkpoint.save_contents", "", kWhole},
    {"checkpoint.load_contents", "", kWhole},
    {"trainer.max_ckpt_to_keep", "checkpoint.keep_last", ""},
    {"trainer.max_actor_ckpt_to_keep", "checkpoint.keep_last", ""},
    {"trainer.max_critic_ckpt_to_keep", "checkpoint.keep_last", ""},
    {"trainer.nnodes", "", kLauncher},
    {"trainer.n_gpus_per_node", "", kLauncher},
    {"trainer.profile_interval", "global_profiler.steps", "each step by its number"},
    {"trainer.default_hdfs_dir", "trainer.default_local_dir",
     "checkpoints are written to a folder, which other programs may copy"},
    {"trainer.log_val_generations", "trainer.log_samples",
     "all samples of validation are written (trainer.validation_data_dir)"},
    {"trainer.use_v1", "", kOneTrainer},
    {"trainer.v1*", "", kOneTrainer},
    {"trainer.use_legacy_worker_impl", "", kOneTrainer},
    {"trainer.ray_wait_register_center_timeout", "trainer.nccl_timeout", ""},
    {"trainer.del_local_ckpt_after_load", "checkpoint.keep_last", "older ones go"},
    {"profiler.tool_config*", "global_profiler.tool", "nsys or torch"},
    {"global_profiler.global_tool_config*", "global_profiler.tool", "nsys or torch"},
    {"ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", kPerRank},
    {"log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", kPerRank},
    {"critic.forward_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu", ""},
    {"use_torch_compile", "", kKernels},
    {"use_fused_kernels", "", kKernels},
    {"fused_kernel_options*", "", kKernels},
    {"use_liger", "", kKernels},
    {"megatron.use_distributed_optimizer", "",
     "data parallel ranks always share the optimizer's state"},
    {"use_dist_checkpointing", "", "model.path is a checkpoint in any format"},
    {"dist_checkpointing_path", "actor_rollout_ref.model.path", "a checkpoint in any format"},
    {"use_mbridge", "", "checkpoints of Hugging Face are read and written as they are"},
    {"vanilla_mbridge", "", "checkpoints of Hugging Face are read and written as they are"},
    {"critic.data_loader_seed", "actor_rollout_ref.actor.data_loader_seed", "the critic's, too"},
    {"reward_model.rollout*", "",
     "reward_model.model has a value head: it scores, and writes none"},
    {"rollout.mode", "", "answers always come one by one, and several turns as their programs say"},
    {"rollout.load_format", "", "the rollout has the actor's weights from the first step on"},
    {"rollout.calculate_log_probs", "", "the rollout always says its log-probabilities"},
    {"rollout.enable_rollout_routing_replay", "actor_rollout_ref.actor.router_replay.mode", "R3"},
    {"rollout.do_sample", "actor_rollout_ref.rollout.temperature", "answers are always drawn"},
    {"rollout.dtype", "actor_rollout_ref.actor.megatron.dtype", "the rollout has the actor's"},
    {"rollout.prompt_length", "data.max_prompt_length", ""},
    {"rollout.response_length", "data.max_response_length", ""},
    {"rollout.max_model_len", "", "data.max_prompt_length and data.max_response_length together"},
    {"rollout.data_parallel_size", "", "ranks that do not share a model are copies of it"},
    {"rollout.engine_kwargs*", "", kEngine},
    {"rollout.pipeline_model_parallel_size", "rollout.tensor_model_parallel_size",
     "a rollout has no stages"},
    {"rollout.quantization*", "", "the rollout has the actor's dtype"},
    {"rollout.repetition_penalty", "", kDecoding},
    {"rollout.layered_summon", "", kEngine},
    {"rollout.multi_stage_wake_up", "", kEngine},
    {"rollout.disable_log_stats", "", kEngine},
    {"rollout.limit_images", "", kEngine},
    {"rollout.cudagraph_capture_sizes", "", kEngine},
    {"rollout.scheduling_policy", "", kEngine},
    {"rollout.logprobs_mode", "", "log-probabilities are those of the drawn distribution"},
    {"rollout.prometheus*", "", kEngine},
    {"rollout.trace*", "trainer.log_samples", "answers are written to files"},
    {"multi_turn.enable", "agent.default_agent_loop", "tool_agent, env_agent or program_agent"},
    {"multi_turn.function_tool_path", "multi_turn.tool_config_path",
     "tools are programs, not functions of Python (docs/training/agents.md)"},
    {"agent.num_workers", "", "each rank of the rollout runs its own sessions"},
    {"agent.agent_loop_config_path", "agent.program_command",
     "a loop of one's own is a program (docs/training/agents.md)"},
    {"data.reward_fn_key", "", "the column is data_source"},
    {"data.return_raw_chat", "", kMessages},
    {"data.return_full_prompt", "", kMessages},
    {"data.filter_overlong_prompts_workers", "", kReaders},
    {"data.tool_config_path", "actor_rollout_ref.rollout.multi_turn.tool_config_path", ""},
    {"ray_kwargs*", "", kLauncher},
    {"ray_init*", "", kLauncher},
    {"hydra*", "trainer.default_local_dir", "one TOML file and overrides describe a run"},
    {"transfer_queue*", "", "ranks hand rows to each other (docs/training/grpo.md)"},
    {"distillation*", "", kAbsent},
    {"use_pf_ppo", "", kAbsent},
    {"pf_ppo*", "", kAbsent},
    {"critic.enable", "algorithm.adv_estimator", "gae has a critic, and no other has one"},
    {"rollout.name", "", kEngine},
    {"custom_reward_function*", "reward_model.command", kPrograms},
    {"reward_model.reward_manager", "reward_model.command", kPrograms},
    {"reward.reward_manager*", "reward_model.command", kPrograms},
    {"reward.reward_model.enable", "reward_model.enable", ""},
    {"reward.reward_model.model_path", "reward_model.model.path", ""},
    {"reward_kwargs*", "reward_model.overlong_buffer.enable", "it applies to every score"},
    {"sandbox_fusion*", "reward_model.command", "\"ferry score\" tests code in its own sandbox"},
    {"launch_reward_fn_async", "reward_model.num_workers",
     "above 1 a program scores while others are answering"},
    {"use_reward_loop", "reward_model.num_workers",
     "above 1 a program scores while others are answering"},
};

// Estimators and losses of verl's that are not implemented.
constexpr std::string_view kPeersValues[] = {
    "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline", "dppo_tv", "dppo_kl", "dro"};

// The place of `name` in a key, behind a dot or at its beginning; npos: it is not there.
std::size_t find_name(std::string_view key, std::string_view name) {
  const bool is_beginning = name.ends_with('*');
  if (is_beginning) name.remove_suffix(1);
  for (std::size_t at = 0; at != key.npos; at = key.find('.', at)) {
    if (at > 0) ++at;
    const auto rest = key.substr(at);
    if (is_beginning ? rest.starts_with(name) : rest == name) return at;
  }
  return key.npos;
}

}  // namespace

std::optional<std::string> hint_for_peers_key(
    std::string_view key, const std::function<bool(const std::string& key)>& exists) {
  for (const auto& [name, other, says] : kPeersKeys) {
    const auto at = find_name(key, name);
    if (at == key.npos) continue;
    if (other.empty()) return std::string(says);
    const auto here = other == "*" ? key.substr(at + name.size() - 1) : other;
    for (const auto& there : {fmt::format("{}{}", key.substr(0, at), here), std::string(here)}) {
      if (exists(there)) return says.empty() ? there : fmt::format("{}: {}", there, says);
    }
  }
  return std::nullopt;
}

std::optional<std::string_view> hint_for_peers_value(std::string_view value) {
  if (std::ranges::find(kPeersValues, value) == std::end(kPeersValues)) return std::nullopt;
  return kAbsent;
}

}  // namespace ferry::trainer
