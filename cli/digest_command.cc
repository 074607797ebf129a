#include <memory>
#include <string>

#include "cli/commands.h"
#include "cli/output_file.h"
#include "cli/report/json.h"
#include "cli/report/text.h"
#include "converter/digest_checkpoint.h"
#include "converter/open/checkpoint.h"
#include "distckpt/base/printable.h"
#include "distckpt/storage/file_io.h"

namespace ferry::cli {
namespace {

constexpr std::string_view kManifestMark = R"("format": "ferry-manifest-)";

struct DigestFlags {
  converter::DigestOptions digest{};
  std::string output{};
  std::string check{};
  bool tensors_only = false;
  bool overwrite = false;
  bool json = false;
  bool quiet = false;
};

void print_check(const DigestFlags& flags,
                 const converter::Manifest& expected,
                 const converter::ManifestCheck& check) {
  const auto& found = check.found;
  if (flags.json) {
    fmt::print("{}\n", json_text(check_json(check)));
  } else if (!flags.quiet) {
    for (const auto& line : check.differences) fmt::print("differs  {}\n", printable(line));
    if (!check.files_compared) {
      fmt::print("note     files were not compared: {}\n",
                 flags.tensors_only ? "as asked"
                 : expected.format != found.format
                     ? "the manifest is of a " + expected.format + " checkpoint"
                     : "the manifest is of a part of a model");
    }
    if (!expected.part.empty()) {
      fmt::print("note     the manifest is of a part of the model: {}\n",
                 converter::describe(expected.part));
    }
    if (check.differences.empty()) {
      fmt::print("matches  {} tensors{}, model {}\n", found.tensors.size(),
                 check.files_compared ? fmt::format(" and {} files", found.files.size()) : "",
                 found.model_digest);
    } else {
      fmt::print("{} entries differ from {}\n", check.differences.size(), flags.check);
    }
  }
}

void run_digest(const CLI::App& command, const DigestFlags& flags) {
  const auto& path = flags.digest.path;
  require_effective(command,
                    {{.here = flags.digest.keep_quantized && !converter::stored_quantization(path),
                      .options = {"--keep-quantized"},
                      .why = fmt::format("{} states no quantisation", path.string())}});
  const OutputFile output(flags.output, kManifestMark, flags.overwrite);
  const auto write = [&](const converter::Manifest& manifest) {
    if (flags.output.empty()) return;
    output.write(converter::write_manifest(manifest), {flags.digest.path, flags.digest.hf_config});
  };
  auto options = flags.digest;
  options.leave_out = {flags.output, flags.check};
  options.files = !flags.tensors_only;
  if (!flags.check.empty()) {
    const auto expected = converter::parse_manifest(distckpt::read_text(flags.check), flags.check);
    const auto check = converter::check_manifest(options, expected, !flags.output.empty(),
                                                 make_progress(flags.quiet));
    write(check.found);
    print_check(flags, expected, check);
    if (!check.differences.empty()) throw CLI::RuntimeError(kNo);
    return;
  }
  const auto manifest = converter::digest_checkpoint(options, make_progress(flags.quiet));
  write(manifest);
  if (flags.json) {
    fmt::print("{}", converter::write_manifest(manifest));
  } else if (!flags.quiet) {
    fmt::print("{}", digest_text(manifest));
  }
}

}  // namespace

void add_digest(CLI::App& app) {
  auto flags = std::make_shared<DigestFlags>();
  auto* command = app.add_subcommand("digest",
                                     "Digest every tensor, independently of format and layout, and "
                                     "every file; write or check a manifest");
  command->add_option("PATH", flags->digest.path, "A checkpoint of any format, or its address")
      ->required();
  auto* const output =
      command->add_option("--output", flags->output, "Write the manifest to this file")
          ->check(not_empty());
  add_overwrite_output(*command, flags->overwrite)->needs(output);
  command->add_option("--check", flags->check, "Compare with this manifest")->check(not_empty());
  command->add_flag(
      "--keep-quantized,--keep-fp8", flags->digest.keep_quantized,
      "Digest quantised weights and their scales as they are. Default: dequantised to bf16, as "
      "convert does");
  command->add_flag("--tensors-only", flags->tensors_only, "Leave the digests of files away");
  add_iteration(*command, "--iteration", flags->digest.iteration,
                "Which iteration of a Megatron checkpoint");
  add_hf_config(*command, flags->digest.hf_config);
  add_threads(*command, flags->digest.threads);
  add_max_memory(*command, flags->digest.max_memory);
  add_json(*command, flags->json);
  add_quiet(*command, flags->quiet);
  command->footer(
      "Exit status: 0 digested (and as the manifest says), 1 the manifest does not match, 2 "
      "trouble.");
  command->callback([command, flags] { run_digest(*command, *flags); });
}

}  // namespace ferry::cli
