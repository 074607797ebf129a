#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/report/delta.h"
#include "cli/report/json.h"
#include "cli/report/text.h"
#include "converter/delta/apply_delta.h"
#include "converter/delta/make_delta.h"
#include "distckpt/base/error.h"

namespace ferry::cli {
namespace {

struct MakeDeltaFlags {
  converter::MakeDeltaOptions options{};
  std::string form = "ferry";
  std::int64_t version = 0;
  bool json = false;
  bool quiet = false;
};

struct ApplyDeltaFlags {
  std::vector<std::string> paths{};
  converter::ConvertOptions options{};
  std::string format{};
  bool json = false;
  bool quiet = false;
};

struct VerifyDeltaFlags {
  std::vector<std::string> paths{};
  converter::VerifyDeltaOptions options{};
  bool json = false;
  bool quiet = false;
};

struct InspectDeltaFlags {
  std::string path{};
  bool tensors = false;
  bool json = false;
};

void run_make(const CLI::App& command, const MakeDeltaFlags& flags) {
  using converter::DeltaTarget;
  require_effective(command, {{.here = flags.form != "slime",
                               .options = {"--version"},
                               .why = "only slime's folders have versions"}});
  auto options = flags.options;
  if (flags.form == "slime") options.form = DeltaTarget::kSlime;
  if (flags.form == "vllm") options.form = DeltaTarget::kVllm;
  if (flags.version != 0) options.version = flags.version;
  const auto report = converter::make_delta(options, make_progress(flags.quiet));
  if (flags.json) {
    fmt::print("{}\n", json_text(make_delta_json(report)));
  } else if (!flags.quiet) {
    fmt::print("{}", make_delta_text(report));
  }
}

converter::DeltaChain open_chain(std::span<const std::string> names) {
  const std::vector<std::filesystem::path> paths(names.begin(), names.end());
  return converter::DeltaChain(paths);
}

void run_apply(const CLI::App& command, const ApplyDeltaFlags& flags) {
  require(flags.paths.size() >= 3, ErrorKind::kUsage,
          "a base, at least one delta and a target are needed");
  auto chain = open_chain(std::span(flags.paths).subspan(1, flags.paths.size() - 2));
  auto options = flags.options;
  options.from = flags.paths.front();
  options.to = flags.paths.back();
  options.format = target_format(flags.format, options);
  options.layout_flags = given_layout(command);
  const auto report = converter::apply_delta(std::move(options), chain, make_progress(flags.quiet));
  if (flags.json) {
    fmt::print("{}\n", json_text(convert_json(report)));
  } else if (!flags.quiet) {
    fmt::print("{}", convert_text(report));
  }
}

void run_verify(const VerifyDeltaFlags& flags) {
  require(flags.paths.size() >= 2, ErrorKind::kUsage, "a base and at least one delta are needed");
  auto chain = open_chain(std::span(flags.paths).subspan(1));
  auto options = flags.options;
  options.base = flags.paths.front();
  const auto report = converter::verify_delta(options, chain, make_progress(flags.quiet));
  if (flags.json) {
    fmt::print("{}\n", json_text(verify_delta_json(report)));
  } else if (!flags.quiet) {
    fmt::print("fits     {} tensors, {}; the result is model {}\n", report.num_tensors,
               format_bytes(report.bytes), report.result_digest);
  }
}

void run_inspect(const CLI::App& command, const InspectDeltaFlags& flags) {
  require_effective(command, {{.here = flags.json,
                               .options = {"--tensors"},
                               .why = "--json lists each tensor that changed"}});
  auto json = nlohmann::ordered_json::array();
  for (const auto& delta : converter::open_deltas(flags.path)) {
    if (flags.json) {
      json.push_back(delta_json(delta->summary()));
    } else {
      fmt::print("{}", delta_text(delta->summary(), flags.tensors));
    }
  }
  if (flags.json) fmt::print("{}\n", json_text(json));
}

void add_make(CLI::App& parent) {
  auto flags = std::make_shared<MakeDeltaFlags>();
  auto* command = parent.add_subcommand(
      "make", "Write what changed from one checkpoint to another, of any formats and layouts");
  command
      ->add_option("BASE", flags->options.ends.left, "The checkpoint that the delta is applied to")
      ->required();
  command->add_option("NEW", flags->options.ends.right, "The checkpoint that becomes of it")
      ->required();
  command
      ->add_option("DELTA", flags->options.to,
                   "The folder to make, or s3://BUCKET/FOLDER; with --to slime the folder of "
                   "versions, in which one is made")
      ->required();
  command
      ->add_option("--to", flags->form,
                   "Form of the delta: Ferry's; a version as slime publishes it (xor); or vllm, "
                   "indices and values of what changed")
      ->check(CLI::IsMember({"ferry", "slime", "vllm"}))
      ->capture_default_str();
  command
      ->add_option("--version", flags->version,
                   "Number of slime's version. Default: the one after the last that is there")
      ->check(CLI::Range(1, 999'999));
  auto& ends = flags->options.ends;
  add_iteration(*command, "--base-iteration", ends.left_iteration,
                "Which iteration of a Megatron base. Default: the tracker's");
  add_iteration(*command, "--new-iteration", ends.right_iteration, "The same of NEW");
  add_hf_config(*command, ends.hf_config);
  add_threads(*command, ends.threads);
  add_max_memory(*command, ends.max_memory);
  add_json(*command, flags->json);
  add_quiet(*command, flags->quiet);
  command->footer("Exit status: 0 made, 2 trouble (nothing was published).");
  command->callback([command, flags] { run_make(*command, *flags); });
}

// Flags of commands that read a base.
template <typename Flags>
void add_reading(CLI::App& command, Flags& flags) {
  add_iteration(command, "--iteration", flags.options.iteration,
                "Which iteration of a Megatron base. Default: the tracker's");
  add_hf_config(command, flags.options.hf_config);
  add_threads(command, flags.options.threads);
  add_max_memory(command, flags.options.max_memory);
  add_json(command, flags.json);
  add_quiet(command, flags.quiet);
}

void add_apply(CLI::App& parent) {
  auto flags = std::make_shared<ApplyDeltaFlags>();
  auto* command = parent.add_subcommand(
      "apply", "Convert a base with deltas applied, in one pass, and prove the result");
  command
      ->add_option("PATH", flags->paths,
                   "BASE DELTA... DST: the checkpoint, deltas in their order (of slime's also a "
                   "folder of versions), and where to write")
      ->required();
  add_target(*command, flags->format, flags->options);
  command->get_option("--resume")
      ->description("Go on with an interrupted run of the same command (not with slime's form)");
  add_reading(*command, *flags);
  command->footer(
      "Exit status: 0 applied and proved, 2 trouble (nothing was published, nothing was lost).");
  command->callback([command, flags] { run_apply(*command, *flags); });
}

void add_verify_delta(CLI::App& parent) {
  auto flags = std::make_shared<VerifyDeltaFlags>();
  auto* command = parent.add_subcommand(
      "verify", "Apply deltas without writing: do they fit the base, and give what they say?");
  command->add_option("PATH", flags->paths, "BASE DELTA...: the checkpoint, deltas in their order")
      ->required();
  add_reading(*command, *flags);
  command->footer("Exit status: 0 they do, 2 they do not, or trouble.");
  command->callback([flags] { run_verify(*flags); });
}

void add_inspect_delta(CLI::App& parent) {
  auto flags = std::make_shared<InspectDeltaFlags>();
  auto* command = parent.add_subcommand("inspect", "Show both ends of a delta, and what changed");
  command->add_option("DELTA", flags->path, "A delta, or a folder of slime's versions")->required();
  command->add_flag("--tensors", flags->tensors, "List each tensor that changed");
  add_json(*command, flags->json);
  command->footer("Exit status: 0 shown, 2 trouble.");
  command->callback([command, flags] { run_inspect(*command, *flags); });
}

}  // namespace

void add_delta(CLI::App& app) {
  auto* command = app.add_subcommand(
      "delta", "What changed between two checkpoints: make, apply, verify and inspect it");
  command->require_subcommand(1);
  command->footer("");  // each has its own
  add_make(*command);
  add_apply(*command);
  add_verify_delta(*command);
  add_inspect_delta(*command);
}

}  // namespace ferry::cli
