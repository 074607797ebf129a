#include "trainer/config/run_sections.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "distckpt/base/error.h"
#include "trainer/config/config_table.h"

namespace ferry::trainer {

template <>
struct ConfigType<Frequency> {
  static constexpr const char* kAfterEachEpoch = "after_each_epoch";
  static std::string name() { return fmt::format("an integer or {}", kAfterEachEpoch); }
  static std::optional<Frequency> read(const ConfigValue& value) {
    if (value == write({.after_each_epoch = true})) return Frequency{.after_each_epoch = true};
    const auto steps = ConfigType<int>::read(value);
    return steps ? std::optional(Frequency{.steps = *steps}) : std::nullopt;
  }
  static ConfigValue write(const Frequency& frequency) {
    if (frequency.after_each_epoch) return {std::string(kAfterEachEpoch)};
    return ConfigType<int>::write(frequency.steps);
  }
};
template <>
struct UsualLimit<Frequency> {
  static ConfigLimit limit() {
    const auto of_steps = at_least(-1);
    return {.words = of_steps.words, .holds = [of_steps](const ConfigValue& value) {
              return std::holds_alternative<std::string>(value.value) || of_steps.holds(value);
            }};
  }
};

int data_parallel_size(const models::ParallelConfig& parallel,
                       int world_size,
                       std::string_view section,
                       std::string_view ep_key) {
  struct Size {
    std::string_view key{};
    int size = 1;
  };
  // Throws unless the product of `sizes` divides the ranks.
  const auto check = [&](const std::vector<Size>& sizes, const std::string& hint) {
    int product = 1;
    std::vector<std::string> words;
    for (const auto& [key, size] : sizes) {
      product *= size;
      if (size > 1) words.push_back(fmt::format("{} {}", key, size));
    }
    if (world_size % product != 0)
      throw Error(ErrorKind::kUsage,
                  fmt::format("{}: {} ranks are no multiple of {}", section, world_size,
                              fmt::join(words, " x ")),
                  hint);
    return world_size / product;
  };
  const Size stages{"pipeline_model_parallel_size", parallel.pipeline_model_parallel_size};
  const auto dp = check({{"tensor_model_parallel_size", parallel.tensor_model_parallel_size},
                         {"context_parallel_size", parallel.context_parallel_size},
                         stages},
                        "");
  const auto of_whole_experts = parallel.expert_model_parallel_size * stages.size;
  check({{"expert_tensor_parallel_size", parallel.expert_tensor_parallel()},
         {ep_key, parallel.expert_model_parallel_size},
         stages},
        parallel.expert_tensor_parallel() > 1 && world_size % of_whole_experts == 0
            ? fmt::format("{}.expert_tensor_parallel_size=1 leaves experts whole{}", section,
                          parallel.expert_tensor_parallel_size
                              ? ""
                              : "; not set, it is tensor_model_parallel_size")
            : "");
  return dp;
}

models::Recompute EngineConfig::recompute() const {
  using Granularity = models::Recompute::Granularity;
  models::Recompute recompute{
      .granularity = recompute_granularity.value_or(Granularity::kNone),
      .method = recompute_method.value_or(models::Recompute::Method::kUniform),
      .num_layers = recompute_num_layers.value_or(1)};
  if (recompute.granularity == Granularity::kSelective) {
    recompute.modules.core_attn = recompute_modules.empty();
    for (const auto module : recompute_modules) recompute.modules.*module = true;
  }
  return recompute;
}

void list_model(ConfigTable& table, std::string section, std::string help, ModelConfig& c) {
  table.section(std::move(section), std::move(help));
  table.add_path("path", c.path, "a checkpoint in any format");
  table.add_path("hf_config_path", c.hf_config_path,
                 "a folder with the config.json that a Megatron checkpoint lacks");
}

void list_tokenizer(ConfigTable& table, ModelConfig& c) {
  table.add_path("tokenizer_path", c.tokenizer_path,
                 "a folder with tokenizer and chat template; empty: hf_config_path, or else path");
}

void list_expert_tensor(ConfigTable& table, std::optional<int>& size) {
  table.add("expert_tensor_parallel_size", size,
            "ranks that share each expert; not set: as tensor_model_parallel_size", at_least(1));
}

void list_mesh(ConfigTable& table, std::string section, std::string help, EngineConfig& c) {
  auto& p = c.parallel;
  table.section(std::move(section), std::move(help));
  table.add("tensor_model_parallel_size", p.tensor_model_parallel_size,
            "ranks that share each layer", at_least(1));
  table.add("sequence_parallel", c.sequence_parallel,
            "tensor parallel ranks, if there are several, share the tokens between layers");
  table.add("pipeline_model_parallel_size", p.pipeline_model_parallel_size, "stages of layers",
            at_least(1));
  table.add("virtual_pipeline_model_parallel_size", p.virtual_pipeline_model_parallel_size,
            "chunks of layers per stage", at_least(2));
  table.add("pipeline_model_parallel_layout", p.pipeline_model_parallel_layout,
            "layers per stage in Megatron-Core's notation: Et*3|(tt|)*2,L; empty: an even share");
  table.add("num_layers_in_first_pipeline_stage", p.num_layers_in_first_pipeline_stage,
            "layers of the first stage, if other than an even share", at_least(1));
  table.add("num_layers_in_last_pipeline_stage", p.num_layers_in_last_pipeline_stage,
            "layers of the last stage, if other than an even share", at_least(1));
  table.add("account_for_embedding_in_pipeline_split", p.account_for_embedding_in_pipeline_split,
            "count the embedding as a layer of the first stage");
  table.add("account_for_loss_in_pipeline_split", p.account_for_loss_in_pipeline_split,
            "count the output layer and loss as a layer of the last stage");
  table.add("context_parallel_size", p.context_parallel_size, "ranks that share each sequence",
            at_least(1));
  table.add("expert_model_parallel_size", p.expert_model_parallel_size,
            "ranks that share the experts", at_least(1));
  list_expert_tensor(table, p.expert_tensor_parallel_size);
  table.add("make_vocab_size_divisible_by", p.make_vocab_size_divisible_by,
            "the padded vocabulary is a multiple of this times tensor_model_parallel_size",
            at_least(1));
  table.add("alignment", c.alignment,
            "fast: Megatron's way; bitwise: log-probabilities are one function of weights and "
            "tokens on any mesh");
  table.add("dtype", c.dtype,
            "dtype of parameters and activations; the optimizer keeps fp32; float16 trains on the "
            "host only");
}

void list_training(ConfigTable& table, EngineConfig& c) {
  table.add_auto("recompute_granularity", c.recompute_granularity,
                 "recomputation in the backward pass: none, whole layers, or parts of them; auto: "
                 "as little as the memory allows");
  table.add("recompute_modules", c.recompute_modules,
            "for selective: the parts that are recomputed; empty: core_attn");
  table.add("recompute_method", c.recompute_method,
            "for full: recompute every group of layers, or the first layers of each stage");
  table.add("recompute_num_layers", c.recompute_num_layers,
            "for full: layers per group, or number of first layers of each stage", at_least(1));
  table.add(
      "grad_reduce_in_fp32", c.grad_reduce_in_fp32,
      "true: gradients add up in float32, over micro-batches and ranks; false: in dtype, which "
      "needs half of their memory");
  table.add_auto("optimizer_offload", c.optimizer_offload,
                 "keep masters and moments in pinned memory of the host, whence an update streams "
                 "them through the GPU; auto: where the run does not fit otherwise, or is faster");
}

void list_load_balancing(ConfigTable& table, EngineConfig& c) {
  table.add("moe_router_load_balancing_type", c.moe_router_load_balancing_type,
            "losses that even out the experts' loads, whatever config.json says; one, or several");
  table.add("moe_aux_loss_coeff", c.moe_aux_loss_coeff,
            "coefficients of these losses, one for each; 1e-2 is a good start", at_least(0));
  table.add("moe_z_loss_coeff", c.moe_z_loss_coeff,
            "coefficient of the loss that keeps the routers' logits small; 1e-3 is a good start",
            at_least(0));
  table.add("moe_router_bias_update_rate", c.moe_router_bias_update_rate,
            "step of the routers' biases towards equal loads after each update, for models that "
            "have them; 1e-3 is DeepSeek-V3's",
            at_least(0));
}

void list_vision_tower(ConfigTable& table, EngineConfig& c) {
  table.add("freeze_vision_tower", c.freeze_vision_tower,
            "true: the vision tower of a model that sees images is not trained; false: it learns "
            "with the language model");
}

void list(ConfigTable& table, std::string section, OptimConfig& c) {
  table.section(std::move(section), "Adam and its schedules, in steps");
  table.add("lr", c.lr, "learning rate after the warm-up", above(0));
  table.add("min_lr", c.min_lr, "learning rate at the end of the decay", at_least(0));
  table.add("adam_beta1", c.adam_beta1, "decay of the first moment", from_below(0, 1));
  table.add("adam_beta2", c.adam_beta2, "decay of the second moment", from_below(0, 1));
  table.add("adam_eps", c.adam_eps, "term added to the root of the second moment", above(0));
  table.add("weight_decay", c.weight_decay,
            "weight decay of parameters that are neither biases nor norms", at_least(0));
  table.add("start_weight_decay", c.start_weight_decay,
            "weight decay at the first step, if it changes", at_least(0));
  table.add("end_weight_decay", c.end_weight_decay, "weight decay at the last step, if it changes",
            at_least(0));
  table.add("weight_decay_incr_style", c.weight_decay_incr_style,
            "change of weight decay between its start and end");
  table.add("decoupled_weight_decay", c.decoupled_weight_decay,
            "true: AdamW; false: L2 in the gradient");
  table.add("clip_grad", c.clip_grad, "largest norm of the gradient; 0: no limit", at_least(0));
  const auto of_moments = one_of({"float32", "bfloat16", "fp32", "bf16"});
  table.add("exp_avg_dtype", c.exp_avg_dtype, "the first moment in memory", of_moments);
  table.add("exp_avg_sq_dtype", c.exp_avg_sq_dtype, "the second moment in memory", of_moments);
  table.add("lr_warmup_init", c.lr_warmup_init, "learning rate at the start of the warm-up",
            at_least(0));
  table.add("lr_warmup_steps", c.lr_warmup_steps,
            "steps of linear warm-up; -1: as lr_warmup_steps_ratio says", at_least(-1));
  table.add(
      "lr_warmup_steps_ratio", c.lr_warmup_steps_ratio,
      "instead of lr_warmup_steps: the share of lr_decay_steps, or of all steps, that warm up",
      from_to(0, 1));
  table.add("lr_decay_style", c.lr_decay_style, "course of the learning rate from lr to min_lr");
  table.add(
      "lr_decay_steps", c.lr_decay_steps,
      "steps until the learning rate is min_lr, warm-up included; not set: all steps of the run",
      at_least(1));
  table.add("lr_wsd_decay_steps", c.lr_wsd_decay_steps,
            "for WSD: number of last steps, in which the learning rate decays", at_least(1));
  table.add("lr_wsd_decay_style", c.lr_wsd_decay_style, "for WSD: course of the decay");
}

void list(ConfigTable& table, std::string section, CheckpointSection& c) {
  table.section(std::move(section), "Checkpoints, below trainer.default_local_dir");
  table.add(
      "save_freq", c.save_freq,
      "steps between checkpoints; after_each_epoch: sft saves behind the last step of each; -1: "
      "sft saves behind its last step alone, grpo and ppo never; 0: no checkpoints");
  table.add("keep_last", c.keep_last, "number of newest checkpoints that are kept; not set: all",
            at_least(1));
  table.add("keep_every", c.keep_every, "also keep checkpoints whose step is a multiple of this",
            at_least(1));
  table.add("async_save", c.async_save, "continue training while a checkpoint is written");
  table.add("save_hf", c.save_hf, "also write the newest model as Hugging Face files");
  table.add("resume_mode", c.resume_mode,
            "auto: continue from the newest checkpoint if there is one; disable: begin anew; "
            "resume_path: continue from resume_from_path");
  table.add_path(
      "resume_from_path", c.resume_from_path,
      "the run to continue from, or one of its checkpoints: RUN/iter_0000100 of sft, else "
      "RUN/actor/iter_0000100");
}

void list(ConfigTable& table, std::string section, TrainerConfig& c) {
  table.section(std::move(section), "The run");
  table.add_path("default_local_dir", c.default_local_dir,
                 "the folder of the run: checkpoints, metrics, timeline");
  table.add("device", c.device, "one GPU for each rank, or the host");
  table.add("nccl_timeout", c.nccl_timeout, "seconds that ranks wait for another rank",
            at_least(1));
  table.add("total_training_steps", c.total_training_steps,
            "steps of the run; not set: the steps of total_epochs", at_least(1));
  table.add("total_epochs", c.total_epochs,
            "passes over the records that are neither malformed nor filtered out", at_least(1));
  table.add("seed", c.seed, "seed of the order of records and of all random numbers", at_least(0));
  table.add(
      "logger", c.logger,
      "destinations of metrics: lines, metrics.jsonl, event files of TensorBoard, and wandb or "
      "mlflow by a Python that has them, which read metrics.jsonl");
  table.add("project_name", c.project_name, "the project of wandb, the experiment of mlflow");
  table.add("experiment_name", c.experiment_name,
            "the name of the run there; empty: that of its folder");
  table.add("val_before_train", c.val_before_train, "validate before the first step");
  table.add(
      "test_freq", c.test_freq,
      "steps between validations; after_each_epoch: sft validates behind the last step of each; "
      "-1: sft validates behind its last step alone, grpo and ppo never");
}

void list(ConfigTable& table, std::string section, GlobalProfilerConfig& c) {
  table.section(std::move(section), "The steps that are profiled, and the profiler");
  table.add("tool", c.tool, "the profiler");
  table.add("steps", c.steps, "steps that are profiled, counted from 1", at_least(1));
  table.add("profile_continuous_steps", c.profile_continuous_steps,
            "put consecutive steps into one profile");
  table.add_path("save_path", c.save_path, "the folder of the profiles");
  table.add("discrete", c.discrete, "put each task of a step into a profile of its own");
}

void list(ConfigTable& table, std::string section, ProfilerConfig& c) {
  table.section(std::move(section), "The ranks that are profiled");
  table.add("enable", c.enable, "profile ranks");
  table.add("all_ranks", c.all_ranks, "profile all ranks");
  table.add("ranks", c.ranks, "profile these ranks", at_least(0));
}

bool TrainerConfig::logs_to(Logger destination) const {
  return std::ranges::find(logger, destination) != logger.end();
}

}  // namespace ferry::trainer
