#include "trainer/config/section_rules.h"
#include "trainer/config/sft_config.h"

namespace ferry::trainer {
namespace {

MicroBatchKeys micro_batch_keys() {
  return {
      .use_dynamic_bsz = "data.use_dynamic_bsz",
      .max_token_len_per_gpu = "data.max_token_len_per_gpu",
      .micro_batch_size_per_gpu = "data.micro_batch_size_per_gpu",
      .context_parallel_size = "engine.context_parallel_size",
      .longest_sequence = {"data.max_length"},
      .batch_size = {"data.train_batch_size"},
  };
}

MicroBatchView micro_batch_view(const SftConfig& c) {
  return {
      .size = c.micro_batches(),
      .context_parallel_size = c.engine.parallel.context_parallel_size,
      .longest_sequence = c.data.max_length,
      .batch_size = c.data.train_batch_size,
  };
}

ConfigRules<SftConfig> make_sft_rules() {
  ConfigRules<SftConfig> rules{
      {"a_model_to_train",
       {"model.path"},
       [](const SftConfig& c) { return !c.model.path.empty(); },
       "the model to train is not named"},
      {"records_to_train_on",
       {"data.train_files"},
       [](const SftConfig& c) { return !c.data.train_files.empty(); },
       "no file of records is named"},
      {"profiled_steps_have_ranks",
       {"global_profiler.steps", "profiler.enable"},
       [](const SftConfig& c) { return c.global_profiler.steps.empty() || c.profiler.enable; },
       "steps are profiled on no rank"},
  };
  const auto engine = [](const SftConfig& c) -> const EngineConfig& { return c.engine; };
  add_rules(rules, mesh_rules(), "engine", engine);
  add_rules(rules, recompute_rules(), "engine", engine);
  add_rules(rules, load_balancing_rules(), "engine", engine);
  add_rules(rules, micro_batch_rules(micro_batch_keys()), "", micro_batch_view);
  add_rules(rules, optim_rules(), "optim",
            [](const SftConfig& c) -> const OptimConfig& { return c.optim; });
  add_rules(rules, run_rules(), "", [](const SftConfig& c) {
    return RunView{c.checkpoint, c.trainer, c.global_profiler, c.data.val_files,
                   c.checkpoint.save_freq != Frequency{0}};
  });
  add_rules(rules, profiler_rules(), "profiler", [](const SftConfig& c) {
    return ProfilerView{c.global_profiler, c.profiler};
  });
  return rules;
}

IneffectiveKeys<SftConfig> make_ineffective_in_sft() {
  IneffectiveKeys<SftConfig> all{
      {{"data.shuffle_buffer_bytes"},
       [](const SftConfig& c) { return c.data.shuffle; },
       "without data.shuffle records come in their order"},
      {{"engine.grad_offload"},
       [](const SftConfig& c) { return !c.data.val_files.empty(); },
       "without data.val_files the run always needs its gradients"},
  };
  add_ineffective(all, ineffective_in_optim(), "optim",
                  [](const SftConfig& c) -> const OptimConfig& { return c.optim; });
  add_ineffective(
      all, ineffective_in_profiler(), "global_profiler",
      [](const SftConfig& c) -> const auto& { return c.global_profiler; });
  add_ineffective(all, ineffective_sizes(micro_batch_keys()), "", micro_batch_view);
  return all;
}

}  // namespace

const IneffectiveKeys<SftConfig>& ineffective_in_sft() {
  static const auto all = make_ineffective_in_sft();
  return all;
}

const ConfigRules<SftConfig>& sft_rules() {
  static const auto rules = make_sft_rules();
  return rules;
}

}  // namespace ferry::trainer
