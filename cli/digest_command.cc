#include <memory>
#include <optional>
#include <string>

#include "cli/commands.h"
#include "cli/output_file.h"
#include "cli/report/json.h"
#include "cli/report/text.h"
#include "converter/digest_checkpoint.h"
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

// Compares with a manifest; prints what differs.
void check(const DigestFlags& flags,
           const converter::Manifest& expected,
           const converter::Manifest& found) {
  // A whole model that is held against the manifest of a part has no files to compare.
  const bool with_files =
      !flags.tensors_only && expected.format == found.format && !found.files.empty();
  const auto lines = converter::compare_manifests(expected, found, with_files);
  if (flags.json) {
    const nlohmann::ordered_json json{{"matches", lines.empty()},
                                      {"model", found.model_digest},
                                      {"files_compared", with_files},
                                      {"differences", lines}};
    fmt::print("{}\n", json_text(json));
  } else if (!flags.quiet) {
    for (const auto& line : lines) fmt::print("differs  {}\n", printable(line));
    if (!with_files) {
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
    if (lines.empty()) {
      fmt::print("matches  {} tensors{}, model {}\n", found.tensors.size(),
                 with_files ? fmt::format(" and {} files", found.files.size()) : "",
                 found.model_digest);
    } else {
      fmt::print("{} entries differ from {}\n", lines.size(), flags.check);
    }
  }
  if (!lines.empty()) throw CLI::RuntimeError(kNo);
}

void run_digest(const DigestFlags& flags) {
  const OutputFile output(flags.output, kManifestMark, flags.overwrite);
  std::optional<converter::Manifest> expected;  // read first: a wrong name is told at once
  if (!flags.check.empty())
    expected = converter::parse_manifest(distckpt::read_text(flags.check), flags.check);
  // Files of another format are not compared, so they are digested for a new manifest alone.
  const bool same_format =
      !expected ||
      expected->format ==
          converter::to_string(converter::locate(flags.digest.path, flags.digest.iteration).format);
  auto options = flags.digest;
  options.leave_out = {flags.output, flags.check};
  if (expected) options.part = expected->part;
  options.files = !flags.tensors_only && (same_format || !flags.output.empty());
  const auto manifest = converter::digest_checkpoint(options, make_progress(flags.quiet));
  if (!flags.output.empty()) output.write(converter::write_manifest(manifest));
  if (expected) return check(flags, *expected, manifest);
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
  command->callback([flags] { run_digest(*flags); });
}

}  // namespace ferry::cli
