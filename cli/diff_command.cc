#include <memory>
#include <string>

#include "cli/commands.h"
#include "cli/output_file.h"
#include "cli/report/diff.h"
#include "cli/report/html.h"
#include "cli/report/json.h"
#include "converter/diff.h"

namespace ferry::cli {
namespace {

struct DiffFlags {
  converter::PairOptions pair{};
  std::string sort = "layer";
  std::string html{};
  bool overwrite = false;
  bool json = false;
  bool quiet = false;
};

void run_diff(const DiffFlags& flags) {
  const OutputFile html(flags.html, kPageMark, flags.overwrite);
  const auto report = converter::diff(flags.pair, make_progress(flags.quiet));
  if (!flags.html.empty()) {
    html.write(diff_html(report), {flags.pair.left, flags.pair.right, flags.pair.hf_config});
  }
  if (flags.json) {
    fmt::print("{}\n", json_text(diff_json(report)));
  } else if (!flags.quiet) {
    const auto order = flags.sort == "changed" ? DiffOrder::kChanged : DiffOrder::kLayer;
    fmt::print("{}", diff_text(report, order));
  }
  if (!report.identical()) throw CLI::RuntimeError(kNo);
}

}  // namespace

void add_diff(CLI::App& app) {
  auto flags = std::make_shared<DiffFlags>();
  auto* command = app.add_subcommand(
      "diff", "Show how the weights of two checkpoints differ, per tensor and per layer");
  command->add_option("A", flags->pair.left, "A checkpoint of any format, or its address")
      ->required();
  command->add_option("B", flags->pair.right, "The one to compare it with")->required();
  auto* const sort =
      command
          ->add_option("--sort", flags->sort,
                       "Order of the table of tensors: by layer, or those that changed most first")
          ->check(CLI::IsMember({"layer", "changed"}))
          ->capture_default_str();
  auto* const html =
      command
          ->add_option("--html", flags->html,
                       "Also write the report to this file: one HTML page with a heat map")
          ->check(not_empty());
  add_overwrite_output(*command, flags->overwrite)->needs(html);
  add_selection(*command, flags->pair.selection, "Compare");
  add_iteration(*command, "--left-iteration", flags->pair.left_iteration,
                "Which iteration of a Megatron checkpoint A");
  add_iteration(*command, "--right-iteration", flags->pair.right_iteration,
                "Which iteration of a Megatron checkpoint B");
  add_hf_config(*command, flags->pair.hf_config);
  add_threads(*command, flags->pair.threads);
  add_max_memory(*command, flags->pair.max_memory);
  add_json(*command, flags->json);
  add_quiet(*command, flags->quiet);
  for (const auto* without_table : {"--json", "--quiet"})
    sort->excludes(command->get_option(without_table));
  command->footer("Exit status: 0 no difference, 1 some, 2 trouble.");
  command->callback([flags] { run_diff(*flags); });
}

}  // namespace ferry::cli
