#include "trainer/config/section_rules.h"

#include <algorithm>
#include <vector>

namespace ferry::trainer {
namespace {

// "max_prompt_length + max_response_length"
std::string sum_of(const std::vector<std::string>& keys) {
  std::string text;
  for (const auto& key : keys) (text += text.empty() ? "" : " + ") += last_name(key);
  return text;
}

}  // namespace

ConfigRules<EngineConfig> mesh_rules() {
  using C = EngineConfig;
  return {
      {"virtual_stages_need_stages",
       {".virtual_pipeline_model_parallel_size", ".pipeline_model_parallel_size"},
       [](const C& c) {
         return !c.parallel.virtual_pipeline_model_parallel_size ||
                c.parallel.pipeline_model_parallel_size > 1;
       },
       "one stage has no chunks to interleave"},
      {"one_way_to_share_layers_out",
       {".pipeline_model_parallel_layout", ".num_layers_in_first_pipeline_stage",
        ".num_layers_in_last_pipeline_stage", ".account_for_embedding_in_pipeline_split",
        ".account_for_loss_in_pipeline_split"},
       [](const C& c) {
         const auto& p = c.parallel;
         return p.pipeline_model_parallel_layout.empty() ||
                !(p.num_layers_in_first_pipeline_stage || p.num_layers_in_last_pipeline_stage ||
                  p.account_for_embedding_in_pipeline_split ||
                  p.account_for_loss_in_pipeline_split);
       },
       "a layout says already which stage has which layers"},
  };
}

ConfigRules<EngineConfig> recompute_rules() {
  using C = EngineConfig;
  return {
      {"full_recompute_is_whole_layers",
       {".recompute_granularity", ".recompute_method", ".recompute_num_layers"},
       [](const C& c) {
         const bool full = c.recompute_granularity == models::Recompute::Granularity::kFull;
         return full == c.recompute_method.has_value() &&
                full == c.recompute_num_layers.has_value();
       },
       "recompute_granularity full needs both recompute_method and recompute_num_layers, which "
       "mean nothing without it"},
      {"selective_recompute_has_modules",
       {".recompute_granularity", ".recompute_modules"},
       [](const C& c) {
         return c.recompute_modules.empty() ||
                c.recompute_granularity == models::Recompute::Granularity::kSelective;
       },
       "modules are of recompute_granularity selective"},
  };
}

ConfigRules<EngineConfig> load_balancing_rules() {
  using C = EngineConfig;
  return {
      {"each_balancing_loss_has_a_coefficient",
       {".moe_router_load_balancing_type", ".moe_aux_loss_coeff"},
       [](const C& c) {
         const auto& types = c.moe_router_load_balancing_type;
         if (types == std::vector{LoadBalancingType::kNone}) return c.moe_aux_loss_coeff.empty();
         return !types.empty() && types.size() == c.moe_aux_loss_coeff.size() &&
                std::ranges::find(types, LoadBalancingType::kNone) == types.end() &&
                std::ranges::all_of(c.moe_aux_loss_coeff, [](double x) { return x > 0; });
       },
       "each loss needs its coefficient above 0 in moe_aux_loss_coeff; none has no coefficient"},
      {"a_balancing_loss_is_named_once",
       {".moe_router_load_balancing_type"},
       [](const C& c) {
         auto types = c.moe_router_load_balancing_type;
         std::ranges::sort(types);
         return std::ranges::adjacent_find(types) == types.end();
       },
       "a loss is named twice"},
  };
}

ConfigRules<OptimConfig> optim_rules() {
  using C = OptimConfig;
  return {
      {"lr_decays_downwards",
       {".lr", ".min_lr", ".lr_warmup_init"},
       [](const C& c) { return c.min_lr <= c.lr && c.lr_warmup_init <= c.lr; },
       "lr is below min_lr or lr_warmup_init"},
      {"one_length_of_the_warmup",
       {".lr_warmup_steps", ".lr_warmup_steps_ratio"},
       [](const C& c) { return c.lr_warmup_steps <= 0 || c.lr_warmup_steps_ratio == 0; },
       "the warm-up has a number of steps and a share of them"},
      {"warmup_ends_before_decay",
       {".lr_warmup_steps", ".lr_decay_steps"},
       [](const C& c) { return !c.lr_decay_steps || c.lr_warmup_steps < *c.lr_decay_steps; },
       "the warm-up is not over when the decay is"},
      {"wsd_has_its_decay",
       {".lr_decay_style", ".lr_wsd_decay_steps"},
       [](const C& c) {
         return (c.lr_decay_style == LrDecayStyle::kWsd) == c.lr_wsd_decay_steps.has_value();
       },
       "lr_decay_style WSD needs lr_wsd_decay_steps, which means nothing without it"},
      {"weight_decay_changes_from_start_to_end",
       {".weight_decay_incr_style", ".start_weight_decay", ".end_weight_decay"},
       [](const C& c) {
         const bool changes = c.weight_decay_incr_style != WdIncrStyle::kConstant;
         return changes == c.start_weight_decay.has_value() &&
                changes == c.end_weight_decay.has_value() &&
                c.start_weight_decay.value_or(0) <= c.end_weight_decay.value_or(0);
       },
       "a style other than constant needs start_weight_decay and an end_weight_decay that is not "
       "below it; constant takes weight_decay alone"},
  };
}

IneffectiveKeys<OptimConfig> ineffective_in_optim() {
  using C = OptimConfig;
  return {
      {{".min_lr"},
       [](const C& c) { return c.lr_decay_style != LrDecayStyle::kConstant; },
       "with lr_decay_style constant the rate does not fall"},
      {{".lr_decay_steps"},
       [](const C& c) {
         return c.lr_decay_style != LrDecayStyle::kConstant || c.lr_warmup_steps_ratio > 0;
       },
       "with lr_decay_style constant the rate does not fall"},
      {{".lr_warmup_init"},
       [](const C& c) { return c.lr_warmup_steps > 0 || c.lr_warmup_steps_ratio > 0; },
       "there is no warm-up: lr_warmup_steps, lr_warmup_steps_ratio"},
      {{".lr_wsd_decay_style"},
       [](const C& c) { return c.lr_decay_style == LrDecayStyle::kWsd; },
       "it is of lr_decay_style WSD"},
  };
}

IneffectiveKeys<MicroBatchView> ineffective_sizes(const MicroBatchKeys& keys) {
  using C = MicroBatchView;
  return {
      {{keys.micro_batch_size_per_gpu},
       [](const C& c) { return !c.size.use_dynamic_bsz; },
       fmt::format("{} packs by tokens", last_name(keys.use_dynamic_bsz))},
      {{keys.max_token_len_per_gpu},
       [](const C& c) { return c.size.use_dynamic_bsz; },
       fmt::format("it is of {}", last_name(keys.use_dynamic_bsz))},
  };
}

IneffectiveKeys<GlobalProfilerConfig> ineffective_in_profiler() {
  return {{{".tool", ".profile_continuous_steps", ".save_path", ".discrete"},
           [](const GlobalProfilerConfig& c) { return !c.steps.empty(); },
           "global_profiler.steps names no step that is profiled"}};
}

ConfigRules<RunView> run_rules() {
  using C = RunView;
  return {
      {"retention_needs_checkpoints",
       {"checkpoint.save_freq", "checkpoint.keep_last", "checkpoint.keep_every",
        "checkpoint.async_save", "checkpoint.save_hf"},
       [](const C& c) {
         const auto& saves = c.checkpoint;
         return c.saves ||
                !(saves.keep_last || saves.keep_every || saves.async_save || saves.save_hf);
       },
       "nothing is saved, so there is nothing to keep, to write meanwhile or to convert"},
      {"keep_every_adds_to_keep_last",
       {"checkpoint.keep_every", "checkpoint.keep_last"},
       [](const C& c) { return !c.checkpoint.keep_every || c.checkpoint.keep_last; },
       "without keep_last all checkpoints stay"},
      {"resume_path_has_a_path",
       {"checkpoint.resume_mode", "checkpoint.resume_from_path"},
       [](const C& c) {
         return (c.checkpoint.resume_mode == ResumeMode::kResumePath) ==
                !c.checkpoint.resume_from_path.empty();
       },
       "resume_mode resume_path needs resume_from_path, which means nothing without it: auto "
       "continues from trainer.default_local_dir alone"},
      {"validation_needs_records",
       {"data.val_files", "trainer.test_freq", "trainer.val_before_train"},
       [](const C& c) {
         return !c.val_files.empty() ||
                (!c.trainer.test_freq.is_regular() && !c.trainer.val_before_train);
       },
       "there is nothing to validate on"},
      {"discrete_profiles_do_not_continue",
       {"global_profiler.discrete", "global_profiler.profile_continuous_steps"},
       [](const C& c) {
         return !c.global_profiler.discrete || !c.global_profiler.profile_continuous_steps;
       },
       "a profile is of a task, or of several steps"},
  };
}

ConfigRules<ProfilerView> profiler_rules() {
  using C = ProfilerView;
  return {
      {"profiling_needs_a_tool",
       {"global_profiler.tool", "global_profiler.steps", ".enable"},
       [](const C& c) { return c.global.tool || (c.global.steps.empty() && !c.role.enable); },
       "steps and ranks are to be profiled by no tool"},
      {"profiled_ranks_have_steps",
       {".enable", ".all_ranks", ".ranks", "global_profiler.steps"},
       [](const C& c) {
         const bool names_ranks = c.role.all_ranks || !c.role.ranks.empty();
         return c.role.enable == names_ranks && (!c.role.enable || !c.global.steps.empty());
       },
       "ranks are profiled where enable says so, which all_ranks or ranks name, in the steps of "
       "global_profiler"},
      {"one_way_to_name_ranks",
       {".all_ranks", ".ranks"},
       [](const C& c) { return !c.role.all_ranks || c.role.ranks.empty(); },
       "ranks are named, and all of them"},
  };
}

ConfigRules<MicroBatchView> micro_batch_rules(const MicroBatchKeys& keys) {
  using C = MicroBatchView;
  auto of_length = keys.longest_sequence;
  of_length.push_back(keys.max_token_len_per_gpu);
  of_length.push_back(keys.context_parallel_size);
  auto of_batch = keys.batch_size;
  ConfigRules<C> rules{
      {"one_size_of_micro_batches",
       {keys.use_dynamic_bsz, keys.micro_batch_size_per_gpu},
       [](const C& c) {
         return c.size.use_dynamic_bsz || c.size.micro_batch_size_per_gpu.has_value();
       },
       fmt::format("without {} micro-batches have {}", last_name(keys.use_dynamic_bsz),
                   last_name(keys.micro_batch_size_per_gpu))},
      {"a_sequence_fits_in_a_micro_batch", of_length,
       [](const C& c) {
         return !c.size.use_dynamic_bsz ||
                c.size.max_token_len(c.context_parallel_size, c.longest_sequence) >=
                    c.longest_sequence;
       },
       fmt::format("a sequence of {} tokens is longer than {} x context_parallel_size",
                   sum_of(keys.longest_sequence), last_name(keys.max_token_len_per_gpu))},
  };
  if (!of_batch.empty()) {
    of_batch.push_back(keys.micro_batch_size_per_gpu);
    rules.push_back({"micro_batches_make_a_batch", of_batch,
                     [](const C& c) {
                       return c.size.use_dynamic_bsz ||
                              c.batch_size % c.size.micro_batch_size_per_gpu.value_or(1) == 0;
                     },
                     "the batch is no multiple of the micro-batch"});
  }
  return rules;
}

}  // namespace ferry::trainer
