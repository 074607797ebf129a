#include <memory>
#include <string>
#include <string_view>

#include "cli/commands.h"
#include "cli/report/json.h"
#include "cli/report/text.h"
#include "converter/adapter/convert_adapter.h"
#include "converter/convert.h"
#include "converter/open/prediction_layers.h"
#include "converter/option_check.h"
#include "distckpt/base/error.h"

namespace ferry::cli {
namespace {

struct ConvertFlags {
  converter::ConvertOptions options{};
  std::string to{};
  converter::ConvertAdapterOptions adapter{};
  std::string dry_run{};
  bool no_ranks = false;
  bool json = false;
  bool quiet = false;
};

void run_convert_adapter(const CLI::App& command, ConvertFlags& flags) {
  auto& adapter = flags.adapter;
  const auto& options = flags.options;
  const auto form = converter::adapter_form(flags.to);
  require(form.has_value(), ErrorKind::kUsage,
          "--to{}: an adapter's target is peft, megatron, verl, vllm or sglang",
          flags.to.empty() ? " is missing" : " " + flags.to);
  adapter.form = *form;
  require_effective(
      command,
      {{.here = true,
        .options = {"--include", "--exclude", "--dry-run", "--overwrite", "--resume",
                    "--max-shard-size", "--iteration", "--megatron-layout", "--mtp",
                    "--no-save-optim", "--keep-quantized", "--quantize", "--follow-symlinks",
                    "--no-ranks"},
        .why =
            "of an adapter all is converted as it is, into a folder that is not there (--base)"}});
  require_layout_of_adapter(command, *form);
  adapter.from = options.from;
  adapter.to = options.to;
  adapter.hf_config = options.hf_config;
  adapter.parallel = options.parallel;
  adapter.dtype = options.dtype;
  adapter.threads = options.threads;
  adapter.max_memory = options.max_memory;
  const auto report = converter::convert_adapter(adapter, make_progress(flags.quiet));
  if (flags.json) {
    fmt::print("{}\n", json_text(adapter_json(report)));
  } else if (!flags.quiet) {
    fmt::print("source   {} ({})\ntarget   {} ({}{})\nadapter  {} parameters, {} factors\nproved\n",
               report.source.string(), form_name(report.source_form), report.target.string(),
               form_name(report.target_form),
               flags.to != "megatron" ? ""
               : report.canonical     ? ", CanonicalLoRA"
                                      : ", LoRA",
               format_count(report.num_parameters), report.num_factors);
  }
}

bool is_of_adapters(std::string_view to) {
  return to != "megatron" && converter::adapter_form(to).has_value();
}

void run_convert(const CLI::App& command, ConvertFlags& flags) {
  if (!flags.adapter.base.empty()) return run_convert_adapter(command, flags);
  require(!flags.adapter.alpha && !is_of_adapters(flags.to), ErrorKind::kUsage,
          "{} is for adapters, whose base --base names",
          flags.adapter.alpha ? "--lora-alpha" : "--to " + flags.to);
  require(flags.dry_run.empty() || flags.dry_run == "plan" || flags.dry_run == "read",
          ErrorKind::kUsage, "--dry-run={}: is neither plan nor read", flags.dry_run);
  auto& options = flags.options;
  if (flags.to == "hf") options.format = converter::Format::kHuggingFace;
  if (flags.to == "h5") options.format = converter::Format::kArchive;
  if (flags.to == "megatron") options.format = converter::Format::kTorchDist;
  if (flags.dry_run == "plan") options.dry_run = converter::DryRun::kPlan;
  if (flags.dry_run == "read") options.dry_run = converter::DryRun::kRead;
  options.layout_flags = given_layout(command);
  if (!flags.no_ranks) options.job = distckpt::rank_from_environment();
  const bool first = options.job.rank == 0;
  const auto report = converter::convert(options, make_progress(flags.quiet || !first));
  if (!first) return;  // rank 0 tells for all
  if (flags.json) {
    fmt::print("{}\n", json_text(convert_json(report)));
  } else if (!flags.quiet) {
    fmt::print("{}", convert_text(report));
  }
}

// The options that say what the target is.
void add_target_options(CLI::App& command, ConvertFlags& flags) {
  command
      .add_option("--to", flags.to,
                  "Format of the target; h5 is Ferry's compressed archive. Default: hf, and "
                  "megatron from hf. Of an adapter: peft, megatron (Megatron-Bridge's), verl, or "
                  "vllm and sglang, which take the factors of each expert under names of its own")
      ->check(CLI::IsMember({"hf", "megatron", "h5", "peft", "verl", "vllm", "sglang"}));
  command.add_option("--base", flags.adapter.base,
                     "SRC is a LoRA adapter (of PEFT, verl, ms-swift or Megatron-Bridge) of this "
                     "checkpoint: convert the adapter");
  command.add_option("--lora-alpha", flags.adapter.alpha,
                     "alpha of an adapter of Megatron-Bridge or of verl's ranks without "
                     "run_config.yaml and lora_train_meta.json");
}

// The options that say in which form the target holds the weights.
void add_form_options(CLI::App& command, converter::ConvertOptions& options) {
  command
      .add_option_function<std::string>(
          "--megatron-layout",
          [&options](const std::string& name) {
            options.megatron_layout = converter::megatron_layout(name);
          },
          "Where a Megatron target keeps a model that also sees: its language model alone, with "
          "the vision tower beside it, or both as Megatron-Bridge or mbridge (verl) names them; "
          "slime: gated delta nets under Hugging Face's names. Default: as the source, or "
          "language-model")
      ->check(CLI::IsMember({"language-model", "megatron-bridge", "mbridge", "slime"}));
  command
      .add_option_function<std::string>(
          "--dtype",
          [&options](const std::string& name) { options.dtype = converter::weight_dtype(name); },
          "Cast all weights, or an adapter's factors, to nearest even; overflow is an error. "
          "Default: none")
      ->transform(as_dtype({"bf16", "fp16", "fp32"}));
  command
      .add_option_function<std::string>(
          "--mtp",
          [&options](const std::string& name) {
            options.mtp = converter::prediction_layers(name).value();
          },
          "Prediction layers (MTP): keep those that are there; drop them, from "
          "config.json too; or error if config.json names some that are missing")
      ->check(CLI::IsMember({"keep", "drop", "error"}))
      ->default_str("keep");
  command.add_flag("--no-save-optim", options.no_save_optim,
                   "From Megatron to Megatron: the model alone, without optimizer and RNG");
  command.add_flag(
      "--keep-quantized,--keep-fp8", options.keep_quantized,
      "To Hugging Face or an archive: leave quantised weights and their scales as they are. "
      "Default: dequantise to bf16, or as --dtype says");
  command
      .add_option_function<std::string>(
          "--quantize",
          [&options](const std::string& name) {
            options.quantize = converter::quantization_method(name);
          },
          "To Hugging Face or an archive: FP8 in blocks of 128 x 128 for the weights of linear "
          "layers; the same for weights that the source holds in MXFP4, without a rounding; or "
          "MXFP4 for the experts of GPT-OSS. After a cast by --dtype")
      ->check(CLI::IsMember({"fp8-block", "fp8-block-lossless", "mxfp4"}));
  command.add_option_function<std::string>(
      "--max-shard-size",
      [&options](const std::string& text) {
        options.max_shard_size = parse_size(text, "--max-shard-size");
      },
      "Split a Hugging Face target anew, or an archive (before compression), into files of at most "
      "this size: 5GB, 500MB");
}

// The options that say how the conversion runs.
void add_run_options(CLI::App& command, ConvertFlags& flags) {
  auto& options = flags.options;
  add_threads(command, options.threads);
  add_max_memory(command, options.max_memory);
  command.add_flag("--dry-run{plan}", flags.dry_run,
                   "Show the plan (files, bytes, memory) and write nothing; --dry-run=read also "
                   "reads and digests");
  command.add_flag("--overwrite", options.overwrite,
                   "Replace a checkpoint of the same format that is there, atomically; what no "
                   "conversion writes is never replaced");
  command.add_flag("--resume", options.resume, "Go on with an interrupted run of the same command");
  command.add_flag("--follow-symlinks", options.follow_symlinks,
                   "Also take files along (tokenizer and the like) that are symbolic links out of "
                   "the checkpoint. Default: refuse them");
  command.add_flag("--no-ranks", flags.no_ranks,
                   "Work alone, though torchrun, srun or mpirun started several processes, which "
                   "else share the work");
}

}  // namespace

void add_convert(CLI::App& app) {
  auto flags = std::make_shared<ConvertFlags>();  // outlives this call: the callback owns it
  auto& options = flags->options;
  auto* command = app.add_subcommand("convert",
                                     "Convert a checkpoint between Hugging Face and Megatron-Core, "
                                     "or to another layout of the same");
  command
      ->add_option(
          "SRC", options.from,
          "A checkpoint: a Hugging Face folder, a Megatron root, one iteration's folder, "
          "an archive, or the address of one: https://HOST/FOLDER, hf://ORG/REPO@REVISION, "
          "s3://BUCKET/KEY")
      ->required();
  command
      ->add_option(
          "DST", options.to,
          "Where to write: a Hugging Face folder, a Megatron root, an archive's folder, or "
          "s3://BUCKET/FOLDER")
      ->required();
  add_target_options(*command, *flags);
  add_iteration(*command, "--iteration", options.iteration,
                "Which iteration of a Megatron source (default: the tracker's), or to write from a "
                "Hugging Face one (default: release)");
  add_hf_config(*command, options.hf_config);
  add_selection(*command, options.selection, "Convert");
  add_layout(*command, options.parallel);
  add_form_options(*command, options);
  add_run_options(*command, *flags);
  add_json(*command, flags->json);
  add_quiet(*command, flags->quiet);
  command->footer(
      "Exit status: 0 converted and proved, 2 trouble (nothing was published, nothing was lost).");
  command->callback([command, flags] { run_convert(*command, *flags); });
}

}  // namespace ferry::cli
