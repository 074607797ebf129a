#include "trainer/config/peers/peers_keys.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <ranges>

namespace ferry::trainer {
namespace {

struct PeersKey {
  // Ends of keys, or, before a *, beginnings of these ends; several with blanks between.
  std::string_view names{};
  // The key here, behind what stands before the name or by itself; *: what is behind the name.
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
constexpr std::string_view kNoPython = "no code of Python's is run";
constexpr std::string_view kRecomputed =
    "activations are computed again, not kept elsewhere; full is whole layers";
constexpr std::string_view kShape = "a model has the shape that its checkpoint says";
constexpr std::string_view kOneTrainer = "there is one trainer";
constexpr std::string_view kInPlace = "files are read where they lie";
constexpr std::string_view kDecoding = "answers are drawn by temperature, top_k and top_p alone";

constexpr PeersKey kPeersKeys[] = {
    // Data
    {"data.pad_mode use_remove_padding pad_bshd_to_minibatch_max pad_to_length "
     "pad_to_length_bucket",
     "", kPacked},
    {"data.train_max_samples data.val_max_samples", "", kFewer},
    {"data.num_workers data.dataloader_num_workers data.filter_overlong_prompts_workers", "",
     kReaders},
    {"data.custom_cls*", "", "records have verl's columns (docs/training/data.md), without Python"},
    {"data.tokenizer", "model.tokenizer_path", ""},
    {"data.tokenizer critic.model.tokenizer_path", "actor_rollout_ref.model.tokenizer_path", ""},
    {"data.sampler*", "data.shuffle", "the order is computed (docs/training/data.md)"},
    {"data.validation_shuffle", "", "validation takes records in the order of their files"},
    {"data.balance_dp_token trainer.balance_batch", "",
     "ranks take records in their order; micro-batches share out the work of each"},
    {"data.video_key data.audio_key", "", "models see images alone"},
    {"data.image_patch_size data.mm_processor_kwargs*", "",
     "the model's files say how it reads images"},
    {"data.return_multi_modal_inputs", "", "images are decoded where they are needed"},
    {"use_shm", "", kInPlace},
    {"data.multiturn*", "data.messages_key", "conversations are always turns"},
    {"data.ignore_input_ids_mismatch", "",
     "the text of a whole conversation is what is learned; a template that says its beginning "
     "otherwise is refused"},
    {"data.reward_fn_key", "", "the column is data_source"},
    {"data.return_raw_chat data.return_full_prompt data.return_raw_input_ids", "", kMessages},
    {"data.tool_config_path data.function_tool_path",
     "actor_rollout_ref.rollout.multi_turn.tool_config_path",
     "tools are programs, not functions of Python (docs/training/agents.md)"},
    // Models
    {"model.partial_pretrain", "model.path", ""},
    {"model.lora* model.target_modules model.exclude_modules", "", kAdapters},
    {"model.mtp* rollout.mtp*", "", "layers that predict further tokens are not trained"},
    {"model.trust_remote_code data.trust_remote_code external_lib "
     "trainer.checkpoint_callback_class",
     "", kNoPython},
    {"model.custom_chat_template", "model.tokenizer_path",
     "a folder with another chat_template.jinja"},
    {"model.custom_chat_template", "actor_rollout_ref.model.tokenizer_path",
     "a folder with another chat_template.jinja"},
    {"critic.model.enable_gradient_checkpointing critic.model.enable_activation_offload",
     "critic.megatron.recompute_granularity", kRecomputed},
    {"model.enable_gradient_checkpointing model.enable_activation_offload "
     "engine.activation_checkpoint* engine.enable_activation_offload "
     "engine.enable_async_activation_offload engine.activation_offload* engine.enable_reentrant",
     "engine.recompute_granularity", kRecomputed},
    {"model.enable_gradient_checkpointing model.enable_activation_offload",
     "actor.megatron.recompute_granularity", kRecomputed},
    {"override_mcore_model_config* override_config*", "", kShape},
    {"model.tiled_mlp* use_torch_compile use_fused_kernels fused_kernel_options* use_liger "
     "entropy_from_logits* entropy_checkpointing",
     "", kKernels},
    // The optimizer
    {"optim.betas", "optim.adam_beta1", "its second number is adam_beta2"},
    {"optim.eps", "optim.adam_eps", ""},
    {"optim.grad_clip", "optim.clip_grad", ""},
    {"actor.grad_clip", "actor.optim.clip_grad", ""},
    {"critic.grad_clip", "critic.optim.clip_grad", ""},
    {"ref.optim*", "", "a reference does not learn"},
    {"ref.megatron.optimizer_offload", "", "a reference has no optimizer"},
    {"optim.lr_scheduler_type optim.warmup_style optim.decay_type", "optim.lr_decay_style", ""},
    {"optim.num_cycles", "optim.lr_decay_style", "a cosine falls once, from lr to min_lr"},
    {"optim.lr_min", "optim.min_lr", ""},
    {"optim.min_lr_ratio optim.min_lr_factor", "optim.min_lr", "a rate, not a share of lr"},
    {"optim.lr_start", "optim.lr_warmup_init", ""},
    {"optim.init_lr_ratio", "optim.lr_warmup_init", "a rate, not a share of lr"},
    {"optim.lr_decay_ratio", "optim.lr_decay_steps", "steps, not a share of them"},
    {"optim.zero_indexed_step", "", "the rate of a step is that of Megatron-Core's scheduler"},
    {"optim.wd_incr_style", "optim.weight_decay_incr_style", ""},
    {"optim.total_training_steps", "trainer.total_training_steps", ""},
    {"optim.use_checkpoint_opt_param_scheduler", "checkpoint.resume_mode",
     "a run that goes on takes the step from its checkpoint, and rates from its configuration"},
    {"optim.main_grads_dtype engine.mp_reduce_dtype", "engine.grad_reduce_in_fp32",
     "false: in engine.dtype"},
    {"optim.main_grads_dtype", "megatron.grad_reduce_in_fp32", "false: in dtype"},
    {"optim.use_precision_aware_optimizer", "optim.exp_avg_dtype",
     "it and exp_avg_sq_dtype are taken as they are"},
    {"optim.master_weight* optim.store_param_remainders", "optim.exp_avg_dtype",
     "masters are float32, and moments what this says"},
    {"optim.optimizer optim.optimizer_impl optim.name optim.muon* "
     "optim.use_layer_wise_distributed_optimizer",
     "", "Adam is the one optimizer"},
    {"optim.override_optimizer_config*", "", "keys of optim are set by their names"},
    // The mesh
    {"engine.param_offload", "engine.optimizer_offload",
     "each step needs the parameters; masters and moments may be elsewhere"},
    {"engine.offload_policy engine.enable_fsdp_offload", "engine.optimizer_offload",
     "masters and moments"},
    {"engine.cp_size", "engine.context_parallel_size", ""},
    {"engine.tp_size engine.tensor_parallel_size", "engine.tensor_model_parallel_size", ""},
    {"engine.pp_size engine.pipeline_parallel_size", "engine.pipeline_model_parallel_size", ""},
    {"engine.ep_size engine.expert_parallel_size", "engine.expert_model_parallel_size", ""},
    {"dynamic_context_parallel max_seqlen_per_dp_cp_rank", "context_parallel_size",
     "of all sequences"},
    {"engine.model_dtype engine.mp_param_dtype engine.mixed_precision", "engine.dtype", ""},
    {"engine.enable_fp8", "engine.dtype", "weights train in it"},
    {"engine.max_seq_len", "data.max_length", ""},
    {"engine.load_checkpoint_path", "model.path", "a checkpoint in any format"},
    {"full_determinism", "alignment", "bitwise"},
    {"full_determinism", "actor_rollout_ref.actor.megatron.alignment", "bitwise"},
    {"seed", "trainer.seed", "of all random numbers"},
    {"override_transformer_config.*", "*", "Megatron-Core's keys stand in the section itself"},
    {"override_transformer_config*", "",
     "keys of Megatron-Core that Ferry has stand in the section itself; kernels are Ferry's own"},
    {"override_ddp_config.*", "*", "Megatron-Core's keys stand in the section itself"},
    {"override_ddp_config*", "grad_reduce_in_fp32", "gradients are reduced in one way"},
    {"override_ddp_config*", "", "a role that does not learn has no gradients"},
    {"megatron.router_replay.mode", "router_replay.mode", ""},
    {"router_replay.record_file router_replay.replay_file", "",
     "routes stay with their answers, in memory"},
    {"router_replay.mode", "actor_rollout_ref.actor.router_replay.mode", "of the actor alone"},
    {"router_replay.mode", "", "it is of reinforcement learning"},
    {"qat*", "", "weights are not trained for a quantized rollout; it has the actor's dtype"},
    {"forward_only", "", "a role says by its name whether it learns"},
    {"megatron.use_distributed_optimizer engine.use_distributed_optimizer use_megatron_fsdp", "",
     "data parallel ranks always share the optimizer's state"},
    {"engine.data_parallel* engine.dp_replicate_size rollout.data_parallel_size", "",
     "ranks that do not share a model are copies of it"},
    {"use_dist_checkpointing dist_checkpointing_prefix", "",
     "model.path is a checkpoint in any format"},
    {"dist_checkpointing_path", "model.path", "a checkpoint in any format"},
    {"dist_checkpointing_path", "actor_rollout_ref.model.path", "a checkpoint in any format"},
    {"dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient", "",
     "any mesh goes on with a checkpoint of another one"},
    {"use_mbridge vanilla_mbridge checkpoint.mbridge_config*", "",
     "checkpoints of Hugging Face are read and written as they are"},
    {"hybrid_engine", "", "roles share all ranks unless ranks of a role say otherwise"},
    {"strategy model_engine fsdp* ulysses* torchtitan* veomni* engine.wrap_policy* "
     "engine.reshard_after_forward engine.forward_prefetch engine.use_orig_params "
     "engine.use_no_sync_for_gradient_accumulation engine.defer_fsdp_grad_sync "
     "engine.distributed_strategy engine.enable_full_shard engine.init_device "
     "engine.ckpt_manager engine.basic_modules engine.moe_config* engine.turbo_config* "
     "engine.spmd_backend",
     "", kMeshes},
    {"engine.attn* engine.backend_config* engine.enable_compile engine.mp_output_dtype "
     "engine.force_use_huggingface engine.moe_implementation "
     "engine.cross_entropy_loss_implementation engine.rms_norm_implementation "
     "engine.swiglu_mlp_implementation engine.rotary_pos_emb_implementation "
     "engine.rms_norm_gated_implementation engine.causal_conv1d_implementation "
     "engine.chunk_gated_delta_rule_implementation engine.load_balancing_loss_implementation "
     "engine.dsa_indexer_implementation engine.dsa_attention_implementation "
     "engine.mhc_implementation engine.qat_implementation",
     "", kKernels},
    // The run
    {"checkpoint.save_contents checkpoint.load_contents checkpoint.strict", "", kWhole},
    {"checkpoint.async_save", "checkpoint.async_save", "of all roles"},
    {"trainer.max_ckpt_to_keep trainer.max_actor_ckpt_to_keep trainer.max_critic_ckpt_to_keep",
     "checkpoint.keep_last", ""},
    {"trainer.del_local_ckpt_after_load", "checkpoint.keep_last", "older ones go"},
    {"trainer.esi_redundant_time", "",
     "no run knows when its machine is taken away; checkpoint.save_freq bounds what is lost"},
    {"trainer.profile_interval", "global_profiler.steps", "each step by its number"},
    {"trainer.default_hdfs_dir", "trainer.default_local_dir",
     "checkpoints are written to a folder, which other programs may copy"},
    {"trainer.log_val_generations", "trainer.log_samples",
     "all samples of validation are written (trainer.validation_data_dir)"},
    {"trainer.use_v1 trainer.v1* trainer.use_legacy_worker_impl", "", kOneTrainer},
    {"trainer.ray_wait_register_center_timeout nccl_timeout", "trainer.nccl_timeout", ""},
    {"reward_model.nnodes reward_model.n_gpus_per_node reward_model.enable_resource_pool",
     "reward_model.ranks", "ranks of its own"},
    {"rollout.nnodes rollout.n_gpus_per_node", "rollout.ranks", "ranks of its own"},
    {"trainer.nnodes trainer.n_gpus_per_node ray_kwargs* ray_init*", "", kLauncher},
    {"hydra*", "trainer.default_local_dir", "one TOML file and overrides describe a run"},
    {"transfer_queue*", "", "ranks hand rows to each other (docs/training/grpo.md)"},
    {"profiler.tool_config* global_profiler.global_tool_config*", "global_profiler.tool",
     "nsys or torch"},
    {"profiler.relocate_results profiler.finish_hook*", "global_profiler.save_path",
     "profiles stay there"},
    {"global_profiler.relocate_results global_profiler.finish_hook*", "global_profiler.save_path",
     "profiles stay there"},
    {"profiler.tool", "global_profiler.tool", ""},
    {"profiler.save_path", "global_profiler.save_path", ""},
    {"ref.profiler* rollout.profiler*", "actor_rollout_ref.actor.profiler.enable",
     "a rank is profiled in all of its roles"},
    // Roles
    {"ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", kPerRank},
    {"log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", kPerRank},
    {"critic.forward_micro_batch_size critic.forward_micro_batch_size_per_gpu",
     "critic.ppo_micro_batch_size_per_gpu", ""},
    {"critic.forward_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu", ""},
    {"critic.data_loader_seed", "actor_rollout_ref.actor.data_loader_seed", "the critic's, too"},
    {"critic.enable", "algorithm.adv_estimator", "gae has a critic, and no other has one"},
    {"rollout_n multi_turn.num_repeat_rollouts", "actor_rollout_ref.rollout.n", ""},
    {"actor.calculate_entropy", "", "the entropy is always a metric"},
    {"actor.use_prefix_grouper", "", "each answer is computed with its prompt"},
    {"reward_model.rollout*", "",
     "reward_model.model has a value head: it scores, and writes none"},
    // The rollout
    {"rollout.mode", "", "answers always come one by one, and several turns as their programs say"},
    {"rollout.load_format", "", "the rollout has the actor's weights from the first step on"},
    {"rollout.calculate_log_probs", "", "the rollout always says its log-probabilities"},
    {"rollout.enable_rollout_routing_replay", "actor_rollout_ref.actor.router_replay.mode", "R3"},
    {"rollout.do_sample", "actor_rollout_ref.rollout.temperature", "answers are always drawn"},
    {"rollout.dtype", "actor_rollout_ref.actor.megatron.dtype", "the rollout has the actor's"},
    {"rollout.prompt_length", "data.max_prompt_length", ""},
    {"rollout.response_length", "data.max_response_length", ""},
    {"rollout.max_model_len", "", "data.max_prompt_length and data.max_response_length together"},
    {"rollout.pipeline_model_parallel_size", "rollout.tensor_model_parallel_size",
     "a rollout has no stages"},
    {"rollout.quantization*", "", "the rollout has the actor's dtype"},
    {"rollout.repetition_penalty", "", kDecoding},
    {"rollout.over_sample_rate", "async_training.partial_rollout",
     "long answers go on in the next step"},
    {"rollout.engine_kwargs* rollout.layered_summon rollout.multi_stage_wake_up "
     "rollout.disable_log_stats rollout.limit_images rollout.cudagraph_capture_sizes "
     "rollout.scheduling_policy rollout.prometheus* rollout.name rollout.router_config_path "
     "rollout.skip_tokenizer_init rollout.disaggregation* "
     "rollout.moe_load_balance_metrics_interval agent.custom_async_server*",
     "", kEngine},
    {"checkpoint_engine.backend checkpoint_engine.engine_kwargs* "
     "checkpoint_engine.custom_backend_module",
     "", "weights go from rank to rank, box by box"},
    {"rollout.logprobs_mode", "", "log-probabilities are those of the drawn distribution"},
    {"rollout.trace*", "trainer.log_samples", "answers are written to files"},
    {"multi_turn.enable", "agent.default_agent_loop", "tool_agent, env_agent or program_agent"},
    {"multi_turn.function_tool_path", "multi_turn.tool_config_path",
     "tools are programs, not functions of Python (docs/training/agents.md)"},
    {"multi_turn.use_inference_chat_template multi_turn.tokenization_sanity_check_mode", "",
     "a turn is the tokens that were said, which are never tokenized again"},
    {"agent.num_workers", "", "each rank of the rollout runs its own sessions"},
    {"agent.agent_loop_config_path", "agent.program_command",
     "a loop of one's own is a program (docs/training/agents.md)"},
    // Rewards
    {"custom_reward_function* reward_model.reward_manager reward.reward_manager* reward_loop*",
     "reward_model.command", kPrograms},
    {"reward.reward_model.enable", "reward_model.enable", ""},
    {"reward.reward_model.model_path", "reward_model.model.path", ""},
    {"reward.num_workers", "reward_model.num_workers", ""},
    {"reward_kwargs*", "reward_model.overlong_buffer.enable", "it applies to every score"},
    {"sandbox_fusion*", "reward_model.command", "\"ferry score\" tests code in its own sandbox"},
    {"launch_reward_fn_async use_reward_loop", "reward_model.num_workers",
     "above 1 a program scores while others are answering"},
    // Algorithms
    {"filter_groups.max_inflight_gen_batches", "algorithm.filter_groups.max_num_gen_batches",
     "one batch is generated at a time"},
    {"distillation* use_pf_ppo pf_ppo* skip.* policy_loss.dro_beta actor.calculate_sum_pi_squared",
     "", kAbsent},
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
  for (const auto& [names, other, says] : kPeersKeys) {
    for (const auto part : std::views::split(names, ' ')) {
      const std::string_view name(part.begin(), part.end());
      const auto at = find_name(key, name);
      if (at == key.npos) continue;
      if (other.empty()) return std::string(says);
      const auto here = other == "*" ? key.substr(at + name.size() - 1) : other;
      for (const auto& there : {fmt::format("{}{}", key.substr(0, at), here), std::string(here)}) {
        if (exists(there)) return says.empty() ? there : fmt::format("{}: {}", there, says);
      }
    }
  }
  return std::nullopt;
}

std::optional<std::string_view> hint_for_peers_value(std::string_view value) {
  if (std::ranges::find(kPeersValues, value) == std::end(kPeersValues)) return std::nullopt;
  return kAbsent;
}

}  // namespace ferry::trainer
