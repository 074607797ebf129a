#include "trainer/config/config_rules.h"

#include <algorithm>

#include "distckpt/error.h"

namespace ferry::trainer {

std::span<const ConfigRule> sft_rules() {
  using C = SftConfig;
  static const std::vector<ConfigRule> rules{
      {"a_model_to_train",
       {"model.path"},
       [](const C& c) { return !c.model.path.empty(); },
       "the model to train is not named"},
      {"records_to_train_on",
       {"data.train_files"},
       [](const C& c) { return !c.data.train_files.empty(); },
       "no file of records is named"},
      {"virtual_stages_need_stages",
       {"engine.virtual_pipeline_model_parallel_size", "engine.pipeline_model_parallel_size"},
       [](const C& c) {
         return !c.engine.parallel.virtual_pipeline_model_parallel_size ||
                c.engine.parallel.pipeline_model_parallel_size > 1;
       },
       "one stage has no chunks to interleave"},
      {"one_way_to_share_layers_out",
       {"engine.pipeline_model_parallel_layout", "engine.num_layers_in_first_pipeline_stage",
        "engine.num_layers_in_last_pipeline_stage",
        "engine.account_for_embedding_in_pipeline_split",
        "engine.account_for_loss_in_pipeline_split"},
       [](const C& c) {
         const auto& p = c.engine.parallel;
         return p.pipeline_model_parallel_layout.empty() ||
                !(p.num_layers_in_first_pipeline_stage || p.num_layers_in_last_pipeline_stage ||
                  p.account_for_embedding_in_pipeline_split ||
                  p.account_for_loss_in_pipeline_split);
       },
       "a layout says already which stage has which layers"},
      {"sequence_parallel_needs_tensor_parallel",
       {"engine.sequence_parallel", "engine.tensor_model_parallel_size"},
       [](const C& c) {
         return !c.engine.sequence_parallel.value_or(false) ||
                c.engine.parallel.tensor_model_parallel_size > 1;
       },
       "one rank has nobody to share tokens with"},
      {"full_recompute_is_whole_layers",
       {"engine.recompute_granularity", "engine.recompute_method", "engine.recompute_num_layers"},
       [](const C& c) {
         const bool full = c.engine.recompute_granularity == "full";
         return full == c.engine.recompute_method.has_value() &&
                full == c.engine.recompute_num_layers.has_value();
       },
       "recompute_granularity full needs both recompute_method and recompute_num_layers, which "
       "mean "
       "nothing without it"},
      {"selective_recompute_has_modules",
       {"engine.recompute_granularity", "engine.recompute_modules"},
       [](const C& c) {
         return c.engine.recompute_modules.empty() || c.engine.recompute_granularity == "selective";
       },
       "modules are of recompute_granularity selective"},
      {"one_size_of_micro_batches",
       {"data.use_dynamic_bsz", "data.micro_batch_size_per_gpu", "data.max_token_len_per_gpu"},
       [](const C& c) {
         return c.data.use_dynamic_bsz ? !c.data.micro_batch_size_per_gpu.has_value()
                                       : c.data.micro_batch_size_per_gpu.has_value() &&
                                             !c.data.max_token_len_per_gpu.has_value();
       },
       "with use_dynamic_bsz micro-batches have max_token_len_per_gpu, without it "
       "micro_batch_size_per_gpu"},
      {"a_sequence_fits_in_a_micro_batch",
       {"data.max_length", "data.max_token_len_per_gpu", "engine.context_parallel_size"},
       [](const C& c) {
         return !c.data.max_token_len_per_gpu || std::int64_t{*c.data.max_token_len_per_gpu} *
                                                         c.engine.parallel.context_parallel_size >=
                                                     c.data.max_length;
       },
       "a sequence of max_length tokens is longer than max_token_len_per_gpu x "
       "context_parallel_size"},
      {"micro_batches_make_a_batch",
       {"data.global_batch_size", "data.micro_batch_size_per_gpu"},
       [](const C& c) {
         return c.data.global_batch_size % c.data.micro_batch_size_per_gpu.value_or(1) == 0;
       },
       "the batch is no multiple of the micro-batch"},
      {"lr_decays_downwards",
       {"optim.lr", "optim.min_lr", "optim.lr_warmup_init"},
       [](const C& c) {
         return c.optim.min_lr <= c.optim.lr && c.optim.lr_warmup_init <= c.optim.lr;
       },
       "lr is below min_lr or lr_warmup_init"},
      {"one_length_of_the_warmup",
       {"optim.lr_warmup_steps", "optim.lr_warmup_steps_ratio"},
       [](const C& c) { return !c.optim.lr_warmup_steps || c.optim.lr_warmup_steps_ratio == 0; },
       "the warm-up has a number of steps and a share of them"},
      {"warmup_ends_before_decay",
       {"optim.lr_warmup_steps", "optim.lr_decay_steps"},
       [](const C& c) {
         return !c.optim.lr_decay_steps ||
                c.optim.lr_warmup_steps.value_or(0) < *c.optim.lr_decay_steps;
       },
       "the warm-up is not over when the decay is"},
      {"wsd_has_its_decay",
       {"optim.lr_decay_style", "optim.lr_wsd_decay_steps"},
       [](const C& c) {
         return (c.optim.lr_decay_style == "WSD") == c.optim.lr_wsd_decay_steps.has_value();
       },
       "lr_decay_style WSD needs lr_wsd_decay_steps, which means nothing without it"},
      {"weight_decay_changes_from_start_to_end",
       {"optim.weight_decay_incr_style", "optim.start_weight_decay", "optim.end_weight_decay"},
       [](const C& c) {
         const bool changes = c.optim.weight_decay_incr_style != "constant";
         return changes == c.optim.start_weight_decay.has_value() &&
                changes == c.optim.end_weight_decay.has_value() &&
                c.optim.start_weight_decay.value_or(0) <= c.optim.end_weight_decay.value_or(0);
       },
       "a style other than constant needs start_weight_decay and an end_weight_decay that is not "
       "below it; constant takes weight_decay alone"},
      {"retention_needs_checkpoints",
       {"checkpoint.save_freq", "checkpoint.keep_last", "checkpoint.keep_every"},
       [](const C& c) {
         return c.checkpoint.save_freq > 0 || !(c.checkpoint.keep_last || c.checkpoint.keep_every);
       },
       "nothing is saved, so there is nothing to keep"},
      {"keep_every_adds_to_keep_last",
       {"checkpoint.keep_every", "checkpoint.keep_last"},
       [](const C& c) { return !c.checkpoint.keep_every || c.checkpoint.keep_last; },
       "without keep_last all checkpoints stay"},
      {"save_freq_is_a_number_of_steps",
       {"checkpoint.save_freq", "trainer.test_freq"},
       [](const C& c) { return c.checkpoint.save_freq != 0 && c.trainer.test_freq != 0; },
       "a frequency is a number of steps above 0, or -1"},
      {"resume_path_has_a_path",
       {"checkpoint.resume_mode", "checkpoint.resume_from_path"},
       [](const C& c) {
         return (c.checkpoint.resume_mode == "resume_path") ==
                !c.checkpoint.resume_from_path.empty();
       },
       "resume_mode resume_path needs resume_from_path, which means nothing without it"},
      {"validation_needs_records",
       {"data.val_files", "trainer.test_freq", "trainer.val_before_train"},
       [](const C& c) {
         return !c.data.val_files.empty() ||
                (c.trainer.test_freq <= 0 && !c.trainer.val_before_train);
       },
       "there is nothing to validate on"},
      {"profiling_needs_a_tool",
       {"global_profiler.tool", "global_profiler.steps", "profiler.enable"},
       [](const C& c) {
         return c.global_profiler.tool || (c.global_profiler.steps.empty() && !c.profiler.enable);
       },
       "steps and ranks are to be profiled by no tool"},
      {"one_way_to_name_ranks",
       {"profiler.all_ranks", "profiler.ranks"},
       [](const C& c) { return !c.profiler.all_ranks || c.profiler.ranks.empty(); },
       "ranks are named, and all of them"},
      {"discrete_profiles_do_not_continue",
       {"global_profiler.discrete", "global_profiler.profile_continuous_steps"},
       [](const C& c) {
         return !c.global_profiler.discrete || !c.global_profiler.profile_continuous_steps;
       },
       "a profile is of a task, or of several steps"},
  };
  return rules;
}

void require_consistent(const SftConfig& config, const ConfigTable& table) {
  for (const auto& rule : sft_rules()) {
    if (rule.holds(config)) continue;
    Error error(ErrorKind::kUsage, fmt::format("configuration: {} [{}]", rule.says, rule.name));
    for (const auto& key : rule.keys) error.add_context("reading " + table.describe(key));
    throw error;
  }
}

}  // namespace ferry::trainer
