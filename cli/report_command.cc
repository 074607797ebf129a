#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "cli/commands.h"
#include "cli/report/run.h"
#include "distckpt/error.h"
#include "distckpt/work_folder.h"

namespace ferry::cli {
namespace {

struct Flags {
  std::filesystem::path run{};
  std::filesystem::path output{};
  std::optional<std::int64_t> step{};
  bool json = false;
  bool quiet = false;
};

void run(const Flags& flags) {
  RunReport report{.log = trainer::read_run(flags.run)};
  report.summaries = trainer::summarize(report.log.metrics);
  report.spans = trainer::read_step_spans(report.log, flags.step);
  require(!flags.step || !report.spans.empty(), ErrorKind::kNotFound,
          "--step {}: no timeline beside {} has it", flags.step.value_or(0),
          report.log.metrics_path.string());
  const auto output =
      flags.output.empty() ? report.log.metrics_path.parent_path() / "report.html" : flags.output;
  distckpt::replace_text(output, run_html(report));
  if (flags.json) {
    fmt::print("{}\n", run_json(report).dump(2));
  } else if (!flags.quiet) {
    fmt::print("{}page     {}\n", run_text(report), output.string());
  }
}

}  // namespace

void add_report(CLI::App& app) {
  auto flags = std::make_shared<Flags>();
  auto* command = app.add_subcommand(
      "report", "Draw the curves, the costs and the timeline of a training run as one HTML page");
  command->add_option("RUN", flags->run, "The folder of a run, or its metrics.jsonl")->required();
  command->add_option("-o,--output", flags->output,
                      "The file to write. Default: report.html beside the metrics");
  command->add_option("--step", flags->step,
                      "The step whose timeline is drawn. Default: the last one of all ranks");
  add_json(*command, flags->json);
  command->add_flag("-q,--quiet", flags->quiet, "No report on stdout unless --json asks for it");
  command->footer("Exit status: 0 written, 2 trouble.");
  command->callback([flags] { run(*flags); });
}

}  // namespace ferry::cli
