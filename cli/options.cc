#include <charconv>
#include <cmath>
#include <map>
#include <vector>

#include "cli/commands.h"
#include "distckpt/base/error.h"

namespace ferry::cli {
void add_json(CLI::App& command, bool& json) {
  command.add_flag("--json", json, "Print the report as JSON on stdout");
}

void add_quiet(CLI::App& command, bool& quiet) {
  command.add_flag("-q,--quiet", quiet, "No progress, and no report unless --json asks for it");
}

void add_threads(CLI::App& command, int& threads) {
  command
      .add_option("--threads", threads,
                  "Threads that read, digest and write. Default: one per core")
      ->check(CLI::Range(1, 1024));
}

void add_max_memory(CLI::App& command, std::int64_t& bytes) {
  command.add_option_function<std::string>(
      "--max-memory",
      [&bytes](const std::string& text) { bytes = parse_size(text, "--max-memory"); },
      "Limit of the staging buffers: 64MiB, 1GiB. Default: 192MiB; reading past the page "
      "cache takes 4 MiB more per thread");
}

void add_hf_config(CLI::App& command, std::filesystem::path& folder) {
  command.add_option(
      "--hf-config", folder,
      "A folder with the config.json (and tokenizer) that a Megatron checkpoint lacks");
}

void add_selection(CLI::App& command, converter::Selection& selection, std::string_view verb) {
  const auto add = [&](const std::string& flag, std::vector<std::string>& globs,
                       std::string_view what) {
    command
        .add_option(flag, globs,
                    fmt::format("{} {} tensors whose Hugging Face name matches: '*.mlp.*'; "
                                "repeatable",
                                verb, what))
        ->type_name("GLOB")
        ->allow_extra_args(false);
  };
  add("--include", selection.include, "only");
  add("--exclude", selection.exclude, "no");
}

std::optional<distckpt::Iteration> parse_iteration_flag(const std::string& text) {
  if (text.empty()) return std::nullopt;
  const auto iteration = distckpt::parse_iteration(text);
  require(iteration.has_value(), ErrorKind::kUsage,
          "--iteration {}: is neither a number nor \"release\"", text);
  return iteration;
}

void add_iteration(CLI::App& command,
                   const std::string& flag,
                   std::optional<distckpt::Iteration>& iteration,
                   const std::string& what) {
  const auto parse = [&iteration](const std::string& text) {
    iteration = parse_iteration_flag(text);
  };
  command.add_option_function<std::string>(flag, parse, what)->type_name("N|release");
}

std::int64_t parse_size(const std::string& text, const std::string& flag) {
  static const std::map<std::string, double> units{
      {"", 1},      {"B", 1},        {"KB", 1e3},     {"MB", 1e6},     {"GB", 1e9},
      {"TB", 1e12}, {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
  double number = 0;
  const auto* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  const auto unit = units.find(std::string(stop, end));
  const bool good =
      error == std::errc() && unit != units.end() && number > 0 && number * unit->second < 0x1p62;
  require(good, ErrorKind::kUsage, "{} {}: is not a size such as 256MiB or 5GB", flag, text);
  return static_cast<std::int64_t>(std::floor(number * unit->second));
}

}  // namespace ferry::cli
