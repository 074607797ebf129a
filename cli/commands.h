// The subcommands. Each *_command.cc parses its options, calls the converter and draws what that
// returns.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "converter/adapter/open_adapter.h"
#include "converter/convert.h"
#include "converter/progress.h"
#include "converter/stored/part.h"
#include "distckpt/storage/filenames.h"
#include "models/spec/parallel_config.h"

namespace ferry::cli {

inline constexpr int kYes = 0;
inline constexpr int kNo = 1;
inline constexpr int kTrouble = 2;

void add_convert(CLI::App& app);
void add_inspect(CLI::App& app);
void add_verify(CLI::App& app);
void add_diff(CLI::App& app);
void add_digest(CLI::App& app);
void add_delta(CLI::App& app);
void add_merge(CLI::App& app);
void add_plan(CLI::App& app);
void add_report(CLI::App& app);
void add_sandbox(CLI::App& app);
void add_score(CLI::App& app);
void add_split(CLI::App& app);
void add_watch(CLI::App& app);

// Options that several subcommands have, with one wording.
void add_json(CLI::App& command, bool& json);
void add_quiet(CLI::App& command, bool& quiet);
void add_threads(CLI::App& command, int& threads);
void add_max_memory(CLI::App& command, std::int64_t& bytes);
void add_hf_config(CLI::App& command, std::filesystem::path& folder);
// The layout of a Megatron target, and those of its options that were given.
void add_layout(CLI::App& command, models::ParallelConfig& parallel);
std::vector<std::string> given_layout(const CLI::App& command);
// Throws Error(kUsage) naming those that were given for an adapter of another form than Megatron's.
void require_layout_of_adapter(const CLI::App& command, converter::AdapterForm form);

// Options that change nothing where something else was asked for.
struct Ineffective {
  bool here = false;  // whether it was
  std::vector<std::string> options{};
  std::string why{};
};
// Throws Error(kUsage) naming those that were given nevertheless.
void require_effective(const CLI::App& command, const std::vector<Ineffective>& table);
// --to, layout, --max-shard-size, --overwrite, --resume: the target of a changed base. `format` is
// what --to says, target_format() what it means.
void add_target(CLI::App& command, std::string& format, converter::ConvertOptions& options);
converter::Format target_format(const std::string& format,
                                const converter::ConvertOptions& options);
void add_selection(CLI::App& command, converter::Selection& selection, std::string_view verb);
void add_iteration(CLI::App& command,
                   const std::string& flag,
                   std::optional<distckpt::Iteration>& iteration,
                   const std::string& what);

// Turns the names that torch and others have for a dtype into one of `known`: "bf16", "fp32", ...
CLI::Validator as_dtype(const std::vector<std::string>& known);

// "256MiB", "5GB", "5 gb", "5G", "1000": bytes. Throws Error(kUsage) naming the flag.
std::int64_t parse_size(const std::string& text, const std::string& flag);

// "10", "release"; nothing for an empty text. Throws Error(kUsage).
std::optional<distckpt::Iteration> parse_iteration_flag(const std::string& text);

// SIGINT and SIGTERM ask to stop from now on; the second of a kind ends the program at once.
void catch_stop_signals();
bool stop_requested();

// Draws a bar on a terminal, lines in a log, nothing if quiet. Stops on SIGINT and SIGTERM.
converter::ProgressFunction make_progress(bool quiet);

}  // namespace ferry::cli
