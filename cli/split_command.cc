#include <algorithm>
#include <memory>
#include <string>

#include "cli/commands.h"
#include "cli/report/json.h"
#include "cli/report/text.h"
#include "converter/adapter/split_adapter.h"

namespace ferry::cli {
namespace {

struct SplitFlags {
  converter::SplitOptions options{};
  std::string form = "peft";
  bool tensors = false;
  bool json = false;
  bool quiet = false;
};

std::string percent(double part, double whole) {
  return fmt::format("{:.4g} %", whole > 0 ? 100 * part / whole : 0.0);
}

void print_split(const SplitFlags& flags, const converter::SplitReport& report) {
  if (flags.json) return fmt::print("{}\n", json_text(split_json(report, flags.options.rank)));
  if (flags.quiet) return;
  if (flags.tensors) {
    for (const auto& tensor : report.tensors) {
      fmt::print("{:>10}  {} [{}, {}]\n", percent(tensor.error, tensor.change), tensor.name,
                 tensor.rows, tensor.columns);
    }
  }
  const auto worst = std::ranges::max_element(
      report.tensors, {}, [](const auto& tensor) { return tensor.error / tensor.change; });
  fmt::print(
      "target   {}\nadapter  {} parameters of rank {} for {} weights; {} tensors are equal in "
      "both\n"
      "left     {} of the change is not in the adapter (Frobenius norm); at most {}, of {}\n"
      "proved   in {:.1f} s\n",
      report.written.target.string(), format_count(report.num_parameters), flags.options.rank,
      report.tensors.size(), report.num_equal, percent(report.error, report.change),
      percent(worst->error, worst->change), worst->name, report.seconds);
}

void run_split(const CLI::App& command, const SplitFlags& flags) {
  auto options = flags.options;
  options.form = converter::adapter_form(flags.form).value();  // CLI11 has checked it
  require_effective(
      command,
      {{.here = flags.json, .options = {"--tensors"}, .why = "--json lists the error of each"},
       {.here = flags.quiet, .options = {"--tensors"}, .why = "--quiet prints no report"}});
  require_layout_of_adapter(command, options.form);
  print_split(flags, converter::split_adapter(options, make_progress(flags.quiet)));
}

}  // namespace

void add_split(CLI::App& app) {
  auto flags = std::make_shared<SplitFlags>();
  auto& options = flags->options;
  auto* command = app.add_subcommand(
      "split", "Make a LoRA adapter of what changed between two checkpoints, at a given rank");
  command->add_option("BASE", options.base, "The checkpoint that the adapter will change")
      ->required();
  command->add_option("TUNED", options.tuned, "The checkpoint that becomes of it")->required();
  command->add_option("DST", options.to, "The folder to make, or s3://BUCKET/FOLDER")->required();
  command
      ->add_option("--rank", options.rank,
                   "Rank of the factors of every weight; alpha is the same, so the factor of their "
                   "product is 1")
      ->required()
      ->check(CLI::Range(1, 65536));
  command
      ->add_option("--to", flags->form,
                   "Form of the adapter: PEFT's, Megatron-Bridge's, verl's, or that of vLLM and "
                   "SGLang, with the factors of each expert under names of its own")
      ->check(CLI::IsMember({"peft", "megatron", "verl", "vllm", "sglang"}))
      ->capture_default_str();
  add_layout(*command, options.parallel);
  add_selection(*command, options.selection, "Split");
  add_iteration(*command, "--base-iteration", options.base_iteration,
                "Which iteration of a Megatron base. Default: the tracker's");
  add_iteration(*command, "--tuned-iteration", options.tuned_iteration, "The same of TUNED");
  add_hf_config(*command, options.hf_config);
  add_threads(*command, options.threads);
  add_max_memory(*command, options.max_memory);
  command->add_flag("--tensors", flags->tensors, "List the error that each weight is left with");
  add_json(*command, flags->json);
  add_quiet(*command, flags->quiet);
  command->footer("Exit status: 0 split and proved, 2 trouble (nothing was published).");
  command->callback([command, flags] { run_split(*command, *flags); });
}

}  // namespace ferry::cli
