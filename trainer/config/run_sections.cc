#include "trainer/config/run_sections.h"

#include <utility>

#include "distckpt/base/error.h"
#include "trainer/config/config_table.h"

namespace ferry::trainer {

int EngineConfig::data_parallel_size(int world_size, std::string_view section) const {
  const auto& p = parallel;
  const auto dense =
      p.tensor_model_parallel_size * p.context_parallel_size * p.pipeline_model_parallel_size;
  const auto experts =
      p.expert_tensor_parallel() * p.expert_model_parallel_size * p.pipeline_model_parallel_size;
  require(world_size % dense == 0, ErrorKind::kUsage,
          "{}: {} ranks are no multiple of tp {} x cp {} x pp {}", section, world_size,
          p.tensor_model_parallel_size, p.context_parallel_size, p.pipeline_model_parallel_size);
  require(world_size % experts == 0, ErrorKind::kUsage,
          "{}: {} ranks are no multiple of etp {} x ep {} x pp {}", section, world_size,
          p.expert_tensor_parallel(), p.expert_model_parallel_size, p.pipeline_model_parallel_size);
  return world_size / dense;
}

void list_model(ConfigTable& table, std::string section, std::string help, ModelConfig& c) {
  table.section(std::move(section), std::move(help));
  table.add("path", c.path, "a checkpoint in any format");
  table.add("hf_config_path", c.hf_config_path,
            "a folder with the config.json that a Megatron checkpoint lacks");
}

void list_tokenizer(ConfigTable& table, ModelConfig& c) {
  table.add("tokenizer_path", c.tokenizer_path,
            "a folder with tokenizer and chat template; empty: hf_config_path, or else path");
}

void list_mesh(ConfigTable& table, std::string section, std::string help, EngineConfig& c) {
  auto& p = c.parallel;
  table.section(std::move(section), std::move(help));
  table.add("tensor_model_parallel_size", p.tensor_model_parallel_size,
            "ranks that share each layer", at_least(1));
  table.add("sequence_parallel", c.sequence_parallel,
            "those ranks share the tokens between layers; not set: where they are more than one");
  table.add("pipeline_model_parallel_size", p.pipeline_model_parallel_size, "stages of layers",
            at_least(1));
  table.add("virtual_pipeline_model_parallel_size", p.virtual_pipeline_model_parallel_size,
            "chunks of layers per stage", at_least(2));
  table.add(
      "pipeline_model_parallel_layout", p.pipeline_model_parallel_layout,
      "layers per stage as Megatron-Core writes it: Et*3|(tt|)*2,L; empty: shared out evenly");
  table.add("num_layers_in_first_pipeline_stage", p.num_layers_in_first_pipeline_stage,
            "where the first stage has another number of layers", at_least(1));
  table.add("num_layers_in_last_pipeline_stage", p.num_layers_in_last_pipeline_stage,
            "where the last stage has another number of layers", at_least(1));
  table.add("account_for_embedding_in_pipeline_split", p.account_for_embedding_in_pipeline_split,
            "the embedding counts as a layer when stages are shared out");
  table.add("account_for_loss_in_pipeline_split", p.account_for_loss_in_pipeline_split,
            "so does the output layer");
  table.add("context_parallel_size", p.context_parallel_size, "ranks that share each sequence",
            at_least(1));
  table.add("expert_model_parallel_size", p.expert_model_parallel_size,
            "ranks that share the experts", at_least(1));
  table.add("expert_tensor_parallel_size", p.expert_tensor_parallel_size,
            "ranks that share each expert; not set: as tensor_model_parallel_size", at_least(1));
  table.add("make_vocab_size_divisible_by", p.make_vocab_size_divisible_by,
            "the padded vocabulary is a multiple of this times tensor_model_parallel_size",
            at_least(1));
  table.add("alignment", c.alignment,
            "Megatron's way, or log-probs that are one function of weights and tokens on any mesh");
  table.add(
      "dtype", c.dtype,
      "of parameters and activations; the optimizer keeps fp32; float16 trains on the host alone");
}

void list_recompute(ConfigTable& table, EngineConfig& c) {
  table.add("recompute_granularity", c.recompute_granularity,
            "what the backward pass computes again: whole layers, or parts of them");
  table.add("recompute_modules", c.recompute_modules, "of selective: the parts; empty: core_attn");
  table.add("recompute_method", c.recompute_method,
            "of full: every group of layers, or the first ones of each stage");
  table.add("recompute_num_layers", c.recompute_num_layers,
            "of full: layers per group, or first layers of each stage", at_least(1));
}

void list(ConfigTable& table, std::string section, OptimConfig& c) {
  table.section(std::move(section), "Adam and its schedules, in steps");
  table.add("lr", c.lr, "learning rate after the warm-up", above(0));
  table.add("min_lr", c.min_lr, "learning rate that it decays to", at_least(0));
  table.add("adam_beta1", c.adam_beta1, "decay of the first moment", from_below(0, 1));
  table.add("adam_beta2", c.adam_beta2, "decay of the second moment", from_below(0, 1));
  table.add("adam_eps", c.adam_eps, "added to the root of the second moment", above(0));
  table.add("weight_decay", c.weight_decay, "of parameters that are neither biases nor norms",
            at_least(0));
  table.add("start_weight_decay", c.start_weight_decay, "where it changes: at the first step",
            at_least(0));
  table.add("end_weight_decay", c.end_weight_decay, "where it changes: at the last step",
            at_least(0));
  table.add("weight_decay_incr_style", c.weight_decay_incr_style, "how weight decay changes");
  table.add("decoupled_weight_decay", c.decoupled_weight_decay, "AdamW; else L2 in the gradient");
  table.add("clip_grad", c.clip_grad, "greatest norm of the gradient; 0: any", at_least(0));
  table.add("lr_warmup_init", c.lr_warmup_init, "learning rate where the warm-up begins",
            at_least(0));
  table.add("lr_warmup_steps", c.lr_warmup_steps, "steps of linear warm-up", at_least(0));
  table.add("lr_warmup_steps_ratio", c.lr_warmup_steps_ratio,
            "instead: the share of lr_decay_steps, or of all steps, that warm up", from_to(0, 1));
  table.add("lr_decay_style", c.lr_decay_style, "how the rate goes from lr to min_lr");
  table.add("lr_decay_steps", c.lr_decay_steps,
            "steps until it is min_lr, the warm-up included; not set: all of the run", at_least(1));
  table.add("lr_wsd_decay_steps", c.lr_wsd_decay_steps, "of WSD: the last ones, in which it decays",
            at_least(1));
  table.add("lr_wsd_decay_style", c.lr_wsd_decay_style, "of WSD: how");
}

void list(ConfigTable& table, std::string section, CheckpointSection& c) {
  table.section(std::move(section), "Checkpoints, below trainer.default_local_dir");
  table.add("save_freq", c.save_freq, "steps from one to the next; -1: none", at_least(-1));
  table.add("keep_last", c.keep_last, "how many stay; not set: all", at_least(1));
  table.add("keep_every", c.keep_every, "besides them, those whose step is a multiple of this stay",
            at_least(1));
  table.add("async_save", c.async_save, "training goes on while a checkpoint is written");
  table.add("save_hf", c.save_hf, "each has the model as Hugging Face files, too");
  table.add("resume_mode", c.resume_mode,
            "go on from the newest one if there is one, begin anew, or take resume_from_path");
  table.add("resume_from_path", c.resume_from_path,
            "the run to go on from, or a checkpoint of it: RUN/iter_0000100 of sft, else "
            "RUN/actor/iter_0000100");
}

void list(ConfigTable& table, std::string section, TrainerConfig& c) {
  table.section(std::move(section), "The run");
  table.add("default_local_dir", c.default_local_dir, "its folder: checkpoints, metrics, timeline");
  table.add("device", c.device, "one GPU for each rank, or the host");
  table.add("nccl_timeout", c.nccl_timeout,
            "seconds after which ranks that wait for another give up", at_least(1));
  table.add("total_training_steps", c.total_training_steps,
            "steps of the run; not set: those of total_epochs", at_least(1));
  table.add("total_epochs", c.total_epochs,
            "times that every record is met that is neither malformed nor filtered", at_least(1));
  table.add("seed", c.seed, "of the order of records and of all that is random", at_least(0));
  table.add("logger", c.logger, "where metrics go: lines, metrics.jsonl, event files");
  table.add("val_before_train", c.val_before_train, "validate before the first step");
  table.add("test_freq", c.test_freq, "steps from one validation to the next; -1: none",
            at_least(-1));
}

void list(ConfigTable& table, std::string section, GlobalProfilerConfig& c) {
  table.section(std::move(section), "Which steps are profiled, and how");
  table.add("tool", c.tool, "the profiler");
  table.add("steps", c.steps, "the steps, counted from 1", at_least(1));
  table.add("profile_continuous_steps", c.profile_continuous_steps,
            "steps that follow each other are one profile");
  table.add("save_path", c.save_path, "the folder of the profiles");
  table.add("discrete", c.discrete, "each task of a step is a profile of its own");
}

void list(ConfigTable& table, std::string section, ProfilerConfig& c) {
  table.section(std::move(section), "Which ranks are profiled");
  table.add("enable", c.enable, "any");
  table.add("all_ranks", c.all_ranks, "all");
  table.add("ranks", c.ranks, "these", at_least(0));
}

}  // namespace ferry::trainer
