#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/output_file.h"
#include "converter/option_check.h"
#include "distckpt/base/error.h"

namespace ferry::cli {
namespace {

std::vector<std::string> given(const CLI::App& command, const std::vector<std::string>& options) {
  std::vector<std::string> found;
  std::ranges::copy_if(options, std::back_inserter(found), [&](const std::string& option) {
    return command.get_option(option)->count() > 0;
  });
  return found;
}

}  // namespace

void add_json(CLI::App& command, bool& json) {
  command.add_flag("--json", json, "Print the report as JSON on stdout");
}

void add_quiet(CLI::App& command, bool& quiet) {
  command.add_flag("-q,--quiet", quiet, "No progress, and no report unless --json asks for it");
}

void add_threads(CLI::App& command, int& threads) {
  command
      .add_option("--threads", threads,
                  "Threads that read, digest and write. Default: one per core that it may use")
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
  command
      .add_option("--hf-config", folder,
                  "A folder with the config.json (and tokenizer) that a Megatron checkpoint lacks")
      ->check(not_empty());
}

void add_layout(CLI::App& command, models::ParallelConfig& parallel) {
  const auto add_size = [&](const std::string& flag, auto& size, const std::string& help) {
    return command.add_option(flag, size, help)->check(CLI::Range(1, 65536));
  };
  add_size("--tp,--tensor-model-parallel-size", parallel.tensor_model_parallel_size,
           "Tensor parallel size of a Megatron target");
  add_size("--pp,--pipeline-model-parallel-size", parallel.pipeline_model_parallel_size,
           "Pipeline parallel size of a Megatron target");
  command.add_option("--num-layers-in-first-pipeline-stage",
                     parallel.num_layers_in_first_pipeline_stage,
                     "Layers of the first stage. Default: an even share");
  command.add_option("--num-layers-in-last-pipeline-stage",
                     parallel.num_layers_in_last_pipeline_stage,
                     "Layers of the last stage. Default: an even share");
  add_size("--vpp,--virtual-pipeline-model-parallel-size",
           parallel.virtual_pipeline_model_parallel_size,
           "Chunks of layers of each pipeline stage, handed out in turn (interleaved)");
  command.add_flag("--account-for-embedding-in-pipeline-split",
                   parallel.account_for_embedding_in_pipeline_split,
                   "Count the embedding as a layer of the first stage");
  command.add_flag("--account-for-loss-in-pipeline-split",
                   parallel.account_for_loss_in_pipeline_split,
                   "Count the output layer and loss as a layer of the last stage");
  command.add_option("--pipeline-model-parallel-layout", parallel.pipeline_model_parallel_layout,
                     "What each stage has, as Megatron-LM spells it: Et*3|(tt|)*2t,L has stages "
                     "apart by |, E embedding, t layer, m prediction layer, L loss");
  add_size("--ep,--expert-model-parallel-size", parallel.expert_model_parallel_size,
           "Expert parallel size of a Megatron target");
  add_size("--etp,--expert-tensor-parallel-size", parallel.expert_tensor_parallel_size,
           "Tensor parallel size of its experts. Default: as --tp");
  add_size("--make-vocab-size-divisible-by", parallel.make_vocab_size_divisible_by,
           "The vocabulary is padded to a multiple of this times TP")
      ->capture_default_str();
}

std::vector<std::string> given_layout(const CLI::App& command) {
  return given(command, {"--tp", "--pp", "--num-layers-in-first-pipeline-stage",
                         "--num-layers-in-last-pipeline-stage", "--vpp",
                         "--account-for-embedding-in-pipeline-split",
                         "--account-for-loss-in-pipeline-split", "--pipeline-model-parallel-layout",
                         "--ep", "--etp", "--make-vocab-size-divisible-by"});
}

void require_layout_of_adapter(const CLI::App& command, converter::AdapterForm form) {
  if (form == converter::AdapterForm::kMegatron) return;
  converter::require_no_layout({}, fmt::format("an adapter of {}", converter::form_name(form)),
                               given_layout(command));
}

void require_effective(const CLI::App& command, const std::vector<Ineffective>& table) {
  for (const auto& row : table) {
    const auto flags = row.here ? given(command, row.options) : std::vector<std::string>();
    if (flags.empty()) continue;
    throw Error(ErrorKind::kUsage,
                fmt::format("{}: has no effect: {}", fmt::join(flags, ", "), row.why),
                "leave it away");
  }
}

void add_target(CLI::App& command, std::string& format, converter::ConvertOptions& options) {
  command.add_option("--to", format, "Format of the target. Default: that of the base, or hf")
      ->check(CLI::IsMember({"hf", "megatron", "h5"}));
  add_layout(command, options.parallel);
  command.add_option_function<std::string>(
      "--max-shard-size",
      [&options](const std::string& text) {
        options.max_shard_size = parse_size(text, "--max-shard-size");
      },
      "Split a Hugging Face target or an archive anew, into files of at most this size: 5GB, "
      "500MB");
  command.add_flag("--overwrite", options.overwrite,
                   "Replace a checkpoint of the same format that is there, atomically");
  command.add_flag("--resume", options.resume, "Go on with an interrupted run of the same command");
}

converter::Format target_format(const std::string& format,
                                const converter::ConvertOptions& options) {
  if (format == "hf") return converter::Format::kHuggingFace;
  if (format == "h5") return converter::Format::kArchive;
  if (format == "megatron") return converter::Format::kTorchDist;
  return converter::format_like_source(options);
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

namespace {

distckpt::Iteration iteration_of(const std::string& flag, const std::string& text) {
  const auto iteration = distckpt::parse_iteration(text);
  require(iteration.has_value(), ErrorKind::kUsage, "{} {}: is neither a number nor \"release\"",
          flag, text);
  return *iteration;
}

}  // namespace

std::optional<distckpt::Iteration> parse_iteration_flag(const std::string& text) {
  if (text.empty()) return std::nullopt;
  return iteration_of("--iteration", text);
}

void add_iteration(CLI::App& command,
                   const std::string& flag,
                   std::optional<distckpt::Iteration>& iteration,
                   const std::string& what) {
  const auto parse = [&iteration, flag](const std::string& text) {
    iteration = iteration_of(flag, text);
  };
  command.add_option_function<std::string>(flag, parse, what)->type_name("N|release");
}

CLI::Validator as_dtype(const std::vector<std::string>& known) {
  const CLI::Validator member = CLI::IsMember(known);
  return {[member](std::string& text) {
            if (const auto dtype = converter::weight_dtype(text)) text = short_name(*dtype);
            return member(text);
          },
          member.get_description()};
}

std::int64_t parse_size(const std::string& text, const std::string& flag) {
  static const std::map<std::string, double> units{
      {"", 1},         {"b", 1},        {"k", 1e3},      {"kb", 1e3},    {"m", 1e6},
      {"mb", 1e6},     {"g", 1e9},      {"gb", 1e9},     {"t", 1e12},    {"tb", 1e12},
      {"kib", 0x1p10}, {"mib", 0x1p20}, {"gib", 0x1p30}, {"tib", 0x1p40}};
  double number = 0;
  const auto* end = text.data() + text.size();
  auto [stop, error] = std::from_chars(text.data(), end, number);
  if (stop != end && *stop == ' ') ++stop;
  std::string letters(stop, end);
  for (auto& c : letters) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  const auto unit = units.find(letters);
  const bool good = error == std::errc() && unit != units.end() && number * unit->second >= 1 &&
                    number * unit->second < 0x1p62;
  require(good, ErrorKind::kUsage, "{} {}: is not a size such as 256MiB or 5GB", flag, text);
  return static_cast<std::int64_t>(std::floor(number * unit->second));
}

}  // namespace ferry::cli
