#include <memory>
#include <string>

#include "cli/commands.h"
#include "cli/report/json.h"
#include "cli/report/text.h"
#include "converter/convert.h"
#include "distckpt/base/error.h"

namespace ferry::cli {
namespace {

struct ConvertFlags {
  std::string from{};
  std::string to{};
  std::string format{};
  std::string iteration{};
  std::string hf_config{};
  converter::Selection selection{};
  std::string mtp = "keep";
  std::string dtype{};
  std::string max_shard_size{};
  std::string max_memory = "192MiB";
  std::string dry_run{};
  models::ParallelConfig parallel{};
  int threads = 0;
  bool keep_fp8 = false;
  bool no_save_optim = false;
  bool no_ranks = false;
  bool overwrite = false;
  bool resume = false;
  bool follow_symlinks = false;
  bool json = false;
  bool quiet = false;
};

converter::ConvertOptions options_of(const ConvertFlags& flags) {
  converter::ConvertOptions options{.from = flags.from, .to = flags.to};
  if (flags.format == "hf") options.format = converter::Format::kHuggingFace;
  if (flags.format == "h5") options.format = converter::Format::kArchive;
  if (flags.format == "megatron") options.format = converter::Format::kTorchDist;
  options.iteration = parse_iteration_flag(flags.iteration);
  options.hf_config = flags.hf_config;
  options.selection = flags.selection;
  options.parallel = flags.parallel;
  if (!flags.dtype.empty()) options.dtype = distckpt::dtype_from_short_name(flags.dtype);
  if (!flags.max_shard_size.empty())
    options.max_shard_size = parse_size(flags.max_shard_size, "--max-shard-size");
  options.keep_fp8 = flags.keep_fp8;
  if (flags.mtp == "drop") options.mtp = converter::PredictionLayers::kDrop;
  if (flags.mtp == "error") options.mtp = converter::PredictionLayers::kError;
  options.no_save_optim = flags.no_save_optim;
  options.threads = flags.threads;
  options.max_memory = parse_size(flags.max_memory, "--max-memory");
  if (flags.dry_run == "plan") options.dry_run = converter::DryRun::kPlan;
  if (flags.dry_run == "read") options.dry_run = converter::DryRun::kRead;
  options.overwrite = flags.overwrite;
  options.resume = flags.resume;
  options.follow_symlinks = flags.follow_symlinks;
  if (!flags.no_ranks) options.job = distckpt::rank_from_environment();
  return options;
}

void run_convert(const ConvertFlags& flags) {
  require(flags.dry_run.empty() || flags.dry_run == "plan" || flags.dry_run == "read",
          ErrorKind::kUsage, "--dry-run={}: is neither plan nor read", flags.dry_run);
  const auto options = options_of(flags);
  const bool first = options.job.rank == 0;
  const auto report = converter::convert(options, make_progress(flags.quiet || !first));
  if (!first) return;  // rank 0 tells for all
  if (flags.json) {
    fmt::print("{}\n", json_text(convert_json(report)));
  } else if (!flags.quiet) {
    fmt::print("{}", convert_text(report));
  }
}

}  // namespace

void add_convert(CLI::App& app) {
  auto flags = std::make_shared<ConvertFlags>();  // outlives this call: the callback owns it
  auto* command = app.add_subcommand("convert",
                                     "Convert a checkpoint between Hugging Face and Megatron-Core, "
                                     "or to another layout of the same");
  command
      ->add_option(
          "SRC", flags->from,
          "A checkpoint: a Hugging Face folder, a Megatron root, one iteration's folder, an "
          "archive, "
          "or the address of one: https://HOST/FOLDER, hf://ORG/REPO@REVISION, s3://BUCKET/KEY")
      ->required();
  command
      ->add_option(
          "DST", flags->to,
          "Where to write: a Hugging Face folder, a Megatron root, an archive's folder, or "
          "s3://BUCKET/FOLDER")
      ->required();
  command
      ->add_option(
          "--to", flags->format,
          "Format of the target; h5 is Ferry's compressed archive. Default: hf, and megatron "
          "from hf")
      ->check(CLI::IsMember({"hf", "megatron", "h5"}));
  add_iteration(*command, "--iteration", flags->iteration,
                "Which iteration of a Megatron source (default: the tracker's), or to write from a "
                "Hugging Face one (default: release)");
  add_hf_config(*command, flags->hf_config);
  add_selection(*command, flags->selection, "Convert");
  auto& parallel = flags->parallel;
  const auto size = CLI::Range(1, 65536);
  command
      ->add_option("--tp,--tensor-model-parallel-size", parallel.tensor_model_parallel_size,
                   "Tensor parallel size of a Megatron target")
      ->check(size);
  command
      ->add_option("--pp,--pipeline-model-parallel-size", parallel.pipeline_model_parallel_size,
                   "Pipeline parallel size of a Megatron target")
      ->check(size);
  command->add_option("--num-layers-in-first-pipeline-stage",
                      parallel.num_layers_in_first_pipeline_stage,
                      "Layers of the first stage. Default: an even share");
  command->add_option("--num-layers-in-last-pipeline-stage",
                      parallel.num_layers_in_last_pipeline_stage,
                      "Layers of the last stage. Default: an even share");
  command
      ->add_option("--vpp,--virtual-pipeline-model-parallel-size",
                   parallel.virtual_pipeline_model_parallel_size,
                   "Chunks of layers of each pipeline stage, handed out in turn (interleaved)")
      ->check(size);
  command->add_flag("--account-for-embedding-in-pipeline-split",
                    parallel.account_for_embedding_in_pipeline_split,
                    "Count the embedding as a layer of the first stage");
  command->add_flag("--account-for-loss-in-pipeline-split",
                    parallel.account_for_loss_in_pipeline_split,
                    "Count the output layer and loss as a layer of the last stage");
  command->add_option("--pipeline-model-parallel-layout", parallel.pipeline_model_parallel_layout,
                      "What each stage has, as Megatron-LM spells it: Et*3|(tt|)*2t,L has stages "
                      "apart by |, E embedding, t layer, m prediction layer, L loss");
  command
      ->add_option("--ep,--expert-model-parallel-size", parallel.expert_model_parallel_size,
                   "Expert parallel size of a Megatron target")
      ->check(size);
  command
      ->add_option("--etp,--expert-tensor-parallel-size", parallel.expert_tensor_parallel_size,
                   "Tensor parallel size of its experts. Default: as --tp")
      ->check(size);
  command
      ->add_option("--make-vocab-size-divisible-by", parallel.make_vocab_size_divisible_by,
                   "The vocabulary is padded to a multiple of this times TP")
      ->check(size)
      ->capture_default_str();
  command
      ->add_option("--dtype", flags->dtype,
                   "Cast all weights, to nearest even; overflow is an error. Default: none")
      ->check(CLI::IsMember({"bf16", "fp16", "fp32"}));
  command
      ->add_option("--mtp", flags->mtp,
                   "Prediction layers (MTP): keep those that are there; drop them, from "
                   "config.json too; or error if config.json names some that are missing")
      ->check(CLI::IsMember({"keep", "drop", "error"}))
      ->capture_default_str();
  command->add_flag("--no-save-optim", flags->no_save_optim,
                    "From Megatron to Megatron: the model alone, without optimizer and RNG");
  command->add_flag(
      "--keep-fp8", flags->keep_fp8,
      "To Hugging Face or an archive: leave FP8 weights and their scales as they are. Default: "
      "dequantise to bf16, or as --dtype says");
  command->add_option(
      "--max-shard-size", flags->max_shard_size,
      "Split a Hugging Face target anew, or an archive (before compression), into files of at most "
      "this size: 5GB, 500MB");
  add_threads(*command, flags->threads);
  add_max_memory(*command, flags->max_memory);
  command->add_flag("--dry-run{plan}", flags->dry_run,
                    "Show the plan (files, bytes, memory) and write nothing; --dry-run=read also "
                    "reads and digests");
  command->add_flag("--overwrite", flags->overwrite,
                    "Replace a checkpoint of the same format that is there, atomically; what no "
                    "conversion writes is never replaced");
  command->add_flag("--resume", flags->resume, "Go on with an interrupted run of the same command");
  command->add_flag("--follow-symlinks", flags->follow_symlinks,
                    "Also take files along (tokenizer and the like) that are symbolic links out of "
                    "the checkpoint. Default: refuse them");
  command->add_flag("--no-ranks", flags->no_ranks,
                    "Work alone, though torchrun, srun or mpirun started several processes, which "
                    "else share the work");
  add_json(*command, flags->json);
  add_quiet(*command, flags->quiet);
  command->footer(
      "Exit status: 0 converted and proved, 2 trouble (nothing was published, nothing was lost).");
  command->callback([flags] { run_convert(*flags); });
}

}  // namespace ferry::cli
