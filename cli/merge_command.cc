#include <memory>
#include <string>

#include "cli/commands.h"
#include "cli/report/json.h"
#include "cli/report/text.h"
#include "converter/adapter/merge_adapter.h"

namespace ferry::cli {
namespace {

struct MergeFlags {
  converter::ConvertOptions options{};
  converter::AdapterToMerge adapter{};
  std::string format{};
  bool json = false;
  bool quiet = false;
};

void print_merged(const MergeFlags& flags, const converter::MergeReport& report) {
  const auto rescaled = report.num_rescaled > 0 ? fmt::format("; {} blocks got another scale",
                                                              format_count(report.num_rescaled))
                                                : std::string();
  if (flags.json) {
    fmt::print("{}\n", json_text(merge_json(report)));
  } else if (!flags.quiet) {
    fmt::print(
        "{}adapter  {} tensors, {} elements: {} changed, {} stayed since the change was less "
        "than half a step of their dtype{}\n",
        convert_text(report.converted), report.num_tensors, format_count(report.num_elements),
        format_count(report.num_changed), format_count(report.num_vanished), rescaled);
  }
}

void run_merge(const CLI::App& command, const MergeFlags& flags) {
  auto options = flags.options;
  options.format = target_format(flags.format, options);
  options.layout_flags = given_layout(command);
  print_merged(flags, converter::merge_adapter(options, flags.adapter, make_progress(flags.quiet)));
}

}  // namespace

void add_merge(CLI::App& app) {
  auto flags = std::make_shared<MergeFlags>();
  auto& options = flags->options;
  auto* command = app.add_subcommand(
      "merge", "Convert a checkpoint with a LoRA adapter merged into its weights");
  command->add_option("BASE", options.from, "The checkpoint that the adapter was trained on")
      ->required();
  command
      ->add_option(
          "ADAPTER", flags->adapter.path,
          "A folder of PEFT (adapter_config.json, adapter_model.safetensors), or a checkpoint of "
          "verl or Megatron-Bridge")
      ->required();
  command->add_option("DST", options.to, "Where to write")->required();
  add_target(*command, flags->format, options);
  command->add_flag(
      "--keep-quantized,--keep-fp8", options.keep_quantized,
      "To Hugging Face or an archive: weights in blocks of FP8 are changed in fp32 and quantised "
      "again, by the scales that they have. Refused where fewer than half of the changes are "
      "left. Default: dequantise to bf16");
  command->add_flag("--allow-vanished", flags->adapter.allow_vanished,
                    "With --keep-quantized: take whatever FP8 leaves of the changes");
  command->add_option("--lora-alpha", flags->adapter.alpha,
                      "alpha of an adapter of Megatron-Bridge or of verl's ranks without "
                      "run_config.yaml and lora_train_meta.json");
  add_iteration(*command, "--iteration", options.iteration,
                "Which iteration of a Megatron base. Default: the tracker's");
  add_hf_config(*command, options.hf_config);
  add_threads(*command, options.threads);
  add_max_memory(*command, options.max_memory);
  add_json(*command, flags->json);
  add_quiet(*command, flags->quiet);
  command->footer(
      "Exit status: 0 merged and proved, 2 trouble (nothing was published, nothing was lost).");
  command->callback([command, flags] { run_merge(*command, *flags); });
}

}  // namespace ferry::cli
