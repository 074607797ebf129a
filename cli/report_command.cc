#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/output_file.h"
#include "cli/report/chart.h"
#include "cli/report/html.h"
#include "cli/report/json.h"
#include "cli/report/run/run.h"
#include "cli/report/run/run_curves.h"
#include "distckpt/base/error.h"
#include "distckpt/base/printable.h"

namespace ferry::cli {
namespace {

namespace fs = std::filesystem;

struct ReportFlags {
  std::vector<fs::path> runs{};
  fs::path output{};
  std::optional<std::int64_t> step{};
  std::vector<fs::path> samples{};
  std::string curve{};
  fs::path svg{};
  std::string over = "steps";
  bool overwrite = false;
  bool json = false;
  bool quiet = false;
};

// Tells the runs from each other: by the name of their folder, or by all of their path.
std::vector<std::string> names_of(const std::vector<fs::path>& runs) {
  std::vector<std::string> names;
  std::set<std::string> different;
  for (const auto& run : runs) {
    const auto folder = fs::is_directory(run) ? run : fs::absolute(run).parent_path();
    const auto path = folder.lexically_normal();
    names.push_back((path.has_filename() ? path : path.parent_path()).filename().string());
    different.insert(names.back());
  }
  if (different.size() == runs.size()) return names;
  for (std::size_t i = 0; i < runs.size(); ++i) names[i] = runs[i].string();
  return names;
}

// One metric of all runs.
void draw_curve(const ReportFlags& flags) {
  const OutputFile svg(flags.svg, kPictureMark, flags.overwrite);
  const auto names = names_of(flags.runs);
  const bool over_seconds = flags.over == "seconds";
  ChartOptions options{
      .title = flags.curve, .axis = over_seconds ? "second" : "step", .smooth = true};
  std::vector<Series> series;
  std::vector<fs::path> sources;
  auto least = std::numeric_limits<double>::infinity();
  auto most = -least;
  for (std::size_t i = 0; i < flags.runs.size(); ++i) {
    const auto log = trainer::read_run(flags.runs[i]);
    sources.push_back(log.metrics_path);
    const bool has_times =
        std::ranges::all_of(log.metrics.steps, [](const auto& step) { return step.time > 0; });
    require(!over_seconds || has_times, ErrorKind::kUsage,
            "--over seconds: {} says of no step when it was", log.metrics_path.string());
    series.push_back(series_of(log.metrics, flags.curve, names[i], over_seconds));
    bool has_value = false;
    for (const auto value : series.back().values) {
      if (!std::isfinite(value)) continue;
      has_value = true;
      least = std::min(least, value);
      most = std::max(most, value);
    }
    if (!has_value) {
      throw Error(ErrorKind::kNotFound,
                  fmt::format("{}: has no value of {}", log.metrics_path.string(), flags.curve),
                  fmt::format("ferry report {} --json names its metrics",
                              shell_quoted(flags.runs[i].string())));
    }
  }
  options.from_zero = least >= 0 && least < most / 2;
  svg.write(chart_file(options, series), sources);
  if (!flags.quiet) fmt::print("picture  {}\n", flags.svg.string());
}

// The curves of several runs.
void write_comparison(const ReportFlags& flags) {
  require(!flags.output.empty(), ErrorKind::kUsage,
          "{} runs: expected --output, the page to write, or --curve", flags.runs.size());
  require(!flags.step && flags.samples.empty() && !flags.json, ErrorKind::kUsage,
          "{} runs: --step, --samples and --json are of one", flags.runs.size());
  const OutputFile page(flags.output, kPageMark, flags.overwrite);
  std::vector<RunReport> runs;
  std::vector<fs::path> sources;
  for (const auto& run : flags.runs) {
    auto& report = runs.emplace_back(RunReport{.log = trainer::read_run(run)});
    sources.push_back(report.log.metrics_path);
    report.summaries = trainer::summarize(report.log.metrics);
  }
  page.write(compare_html(runs, names_of(flags.runs)), sources);
  if (!flags.quiet) fmt::print("page     {}\n", flags.output.string());
}

void write_page(const ReportFlags& flags) {
  RunReport report{.log = trainer::read_run(flags.runs.front())};
  report.summaries = trainer::summarize(report.log.metrics);
  report.spans = trainer::read_step_spans(report.log, flags.step);
  const auto folder = report.log.metrics_path.parent_path();
  const auto sessions = folder / "sessions";
  for (const auto& [name, journal] :
       {std::pair(trainer::kValidationDataFolder, sessions / "validation"),
        std::pair(trainer::kRolloutDataFolder, sessions)}) {
    auto set = read_sample_set(folder / name, flags.step, journal);
    if (!set.steps.empty()) report.samples.push_back(std::move(set));
  }
  for (const auto& path : flags.samples) {
    report.samples.push_back(read_sample_set(path, flags.step));
    require(!report.samples.back().steps.empty(), ErrorKind::kNotFound,
            "--samples {}: holds no samples, <step>.jsonl", path.string());
  }
  const bool has_step =
      !report.spans.empty() || std::ranges::any_of(report.samples, [&](const SampleSet& set) {
        return std::ranges::find(set.steps, flags.step.value_or(0), &ShownStep::step) !=
               set.steps.end();
      });
  require(!flags.step || has_step, ErrorKind::kNotFound,
          "--step {}: no timeline and no samples beside {} have it", flags.step.value_or(0),
          report.log.metrics_path.string());
  const auto output = flags.output.empty() ? folder / "report.html" : flags.output;
  std::vector<fs::path> sources{report.log.metrics_path};
  for (const auto& set : report.samples) sources.push_back(set.folder);
  OutputFile(output, kPageMark, flags.overwrite).write(run_html(report), sources);
  if (flags.json) {
    fmt::print("{}\n", json_text(run_json(report)));
  } else if (!flags.quiet) {
    fmt::print("{}page     {}\n", run_text(report), output.string());
  }
}

}  // namespace

void add_report(CLI::App& app) {
  auto flags = std::make_shared<ReportFlags>();
  auto* command = app.add_subcommand(
      "report",
      "Draw the curves, samples, costs and the timeline of a training run as one HTML page");
  command
      ->add_option("RUN", flags->runs,
                   "The folder of a run, or its metrics.jsonl; several are compared")
      ->required();
  command
      ->add_option("-o,--output", flags->output,
                   "The file to write. Default: report.html beside the metrics of one run")
      ->check(not_empty());
  command->add_option("--step", flags->step,
                      "The step whose timeline is drawn, and whose samples are among those shown. "
                      "Default: the last one of all ranks");
  command
      ->add_option("--samples", flags->samples,
                   "A folder of samples, besides rollouts and validations of the run; may "
                   "be repeated")
      ->allow_extra_args(false);
  auto* const curve = command->add_option(
      "--curve", flags->curve, "Instead of a page, draw this metric of all runs as one picture");
  auto* const svg =
      command->add_option("--svg", flags->svg, "The picture to write")->check(not_empty());
  command
      ->add_option("--over", flags->over,
                   "The axis of the curve; seconds are counted from the first metrics of each run")
      ->check(CLI::IsMember({"steps", "seconds"}))
      ->capture_default_str()
      ->needs(curve);
  curve->needs(svg);
  svg->needs(curve);
  add_overwrite_output(*command, flags->overwrite);
  add_json(*command, flags->json);
  for (const auto* of_page : {"--output", "--step", "--samples", "--json"})
    curve->excludes(command->get_option(of_page));
  command->add_flag("-q,--quiet", flags->quiet, "No report on stdout unless --json asks for it");
  command->footer("Exit status: 0 written, 2 trouble.");
  command->callback([flags] {
    if (!flags->curve.empty())
      draw_curve(*flags);
    else if (flags->runs.size() > 1)
      write_comparison(*flags);
    else
      write_page(*flags);
  });
}

}  // namespace ferry::cli
