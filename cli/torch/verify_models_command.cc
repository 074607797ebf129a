#include <memory>
#include <set>
#include <string>

#include "cli/commands.h"
#include "cli/output_file.h"
#include "cli/report/html.h"
#include "cli/torch/commands.h"
#include "cli/torch/report/logits_report.h"
#include "cli/torch/report/numerics_report.h"
#include "converter/alignment/logits_check.h"
#include "converter/alignment/model_files.h"
#include "distckpt/base/error.h"
#include "distckpt/base/printable.h"
#include "models/certificate/host_threads.h"
#include "models/certificate/numerics_certificate.h"
#include "models/distributed/messages.h"
#include "models/distributed/parallel_state.h"
#include "models/pipeline_forward.h"

namespace ferry::cli {
namespace {

constexpr std::int64_t kMostColumnsOfHost = 8192;  // of a vocabulary: all of one take minutes

struct VerifyModelsFlags {
  std::string numerics{};
  std::string checkpoint{};
  std::string reference{};
  std::optional<distckpt::Iteration> iteration{};
  std::filesystem::path hf_config{};
  std::string dtype{};
  std::string html{};
  bool overwrite = false;
  MeshFlags mesh{};
  bool packed = false;
  bool finite = false;
  bool json = false;
  bool quiet = false;
};

distckpt::DType dtype_of(const VerifyModelsFlags& flags, const converter::Reference& reference) {
  if (flags.dtype == "fp32") return distckpt::DType::kF32;
  if (flags.dtype == "bf16") return distckpt::DType::kBF16;
  return reference.sequences[0].logits.scalar_type() == at::kFloat ? distckpt::DType::kF32
                                                                   : distckpt::DType::kBF16;
}

void verify_numerics(const VerifyModelsFlags& flags) {
  const auto checkpoint =
      converter::open(flags.numerics, {.iteration = flags.iteration, .hf_config = flags.hf_config});
  const auto device = world_options(flags.mesh).device;
  const auto certificate =
      models::certify_numerics(checkpoint.map.config,
                               {.device = device,
                                .dtype = flags.dtype == "fp32" ? at::kFloat : at::kBFloat16,
                                .most_columns = device.is_cuda() ? 0 : kMostColumnsOfHost},
                               models::bitwise_ops(device));
  if (flags.json) {
    fmt::print("{}\n", numerics_json(certificate).dump(2));
  } else if (!flags.quiet) {
    fmt::print("{}", numerics_text(certificate));
  }
  if (!certificate.passed()) throw CLI::RuntimeError(kNo);
}

// Weights that are not finite are named by rank 0; with --finite they are refused.
void check_finite(const std::vector<std::unique_ptr<models::GPTModel>>& chunks,
                  const VerifyModelsFlags& flags) {
  std::set<std::string> keys;
  for (const auto& chunk : chunks) {
    for (const auto& key : chunk->parameters().not_finite()) keys.insert(key);
  }
  const auto& all = chunks.front()->mesh().all();
  for (auto& of_rank : models::gather(all, std::set(keys))) keys.merge(of_rank);
  if (keys.empty()) return;
  const auto named = fmt::format(
      "{}{}", *keys.begin(), keys.size() == 1 ? "" : fmt::format(" and {} more", keys.size() - 1));
  require(!flags.finite, ErrorKind::kCorrupt, "{}: the weights hold NaN or Inf", named);
  if (all.rank() == 0 && !flags.quiet)
    fmt::print(stderr, "note       NaN or Inf among the weights of {}\n", named);
}

void verify_logits(const VerifyModelsFlags& flags) {
  const OutputFile html(flags.html, kPageMark, flags.overwrite);
  const auto parallel = parallel_of(flags.mesh);
  require(!flags.checkpoint.empty(), ErrorKind::kUsage, "--logits names no checkpoint");
  if (flags.reference.empty()) {
    throw Error(
        ErrorKind::kUsage, "there is no --reference to compare with",
        fmt::format("make one, with transformers 5.17.0 and torch 2.11.0: "
                    "python3 tests/interop/hf_reference.py {} reference.safetensors --layers",
                    shell_quoted(flags.checkpoint)));
  }
  const auto reference = converter::read_reference(flags.reference);
  const auto checkpoint = converter::open(
      flags.checkpoint, {.iteration = flags.iteration, .hf_config = flags.hf_config});
  const auto dtype = dtype_of(flags, reference);
  const auto family = converter::family_by_arguments(checkpoint, "--hf-config");
  bool equal = true;
  run_mesh(flags.mesh, 1, [&](models::World& world) {
    const models::ParallelState mesh(world, parallel, "verify");
    models::choose_host_threads(world, checkpoint.map.config);
    const auto chunks = models::make_stage(checkpoint.map.config, mesh,
                                           {.alignment = alignment_of(flags.mesh),
                                            .dtype = dtype,
                                            .sequence_parallel = flags.mesh.sequence_parallel});
    converter::load_model(chunks, checkpoint, {.round = true});
    check_finite(chunks, flags);
    const auto report = converter::check_logits(chunks, reference, {.packed = flags.packed});
    mesh.all().barrier();
    if (world.rank() != 0) return;
    if (!family.empty() && !flags.quiet) fmt::print(stderr, "{:<10} {}\n", "family", family);
    equal = report.equal();
    const LogitsSubject subject{.checkpoint = flags.checkpoint,
                                .reference = flags.reference,
                                .family = checkpoint.map.config.family,
                                .alignment = flags.mesh.alignment,
                                .dtype = std::string(short_name(dtype)),
                                .device = flags.mesh.device,
                                .mesh = mesh.shape(),
                                .sequence_parallel = flags.mesh.sequence_parallel};
    if (!flags.html.empty()) {
      html.write(logits_html(subject, report),
                 {flags.checkpoint, flags.reference, flags.hf_config});
    }
    if (flags.json) {
      fmt::print("{}\n", logits_json(subject, report).dump(2));
    } else if (!flags.quiet) {
      fmt::print("{}", logits_text(subject, report));
    }
  });
  if (!equal) throw CLI::RuntimeError(kNo);
}

}  // namespace

void add_verify_models(CLI::App& app) {
  auto flags = std::make_shared<VerifyModelsFlags>();
  auto* command = app.add_subcommand(
      "verify", "Compare our model of a checkpoint with what another program computes from it");
  command->add_option("--logits", flags->checkpoint, "The checkpoint, in any format")
      ->expected(0, 1);
  command->add_option(
      "--numerics", flags->numerics,
      "Certify, for the shapes of this checkpoint's model, that the operations of this "
      "machine are bitwise: PASS or FAIL");
  command->add_option("--reference", flags->reference,
                      "What transformers computes: a file of hf_reference.py CHECKPOINT FILE");
  add_iteration(*command, "--iteration", flags->iteration,
                "Which iteration of a Megatron checkpoint");
  add_hf_config(*command, flags->hf_config);
  add_mesh(*command, flags->mesh);
  command
      ->add_option("--dtype", flags->dtype,
                   "What the model computes in: bf16 or fp32. Default: as the reference")
      ->transform(as_dtype({"bf16", "fp32"}));
  command->add_flag("--packed", flags->packed,
                    "All sequences in one batch. Default: one at a time");
  command->add_flag("--finite", flags->finite,
                    "Refuse weights that hold NaN or Inf. Default: a note names them");
  command->add_option("--html", flags->html, "Also draw where they differ, into this file");
  add_overwrite_output(*command, flags->overwrite);
  add_json(*command, flags->json);
  add_quiet(*command, flags->quiet);
  command->footer(
      "Ranks are those that torchrun, srun or mpirun started; of one process on the host they are "
      "threads.\nExit status: 0 equal in every bit, 1 something differs, 2 trouble.");
  command->callback([command, flags] {
    require_effective(*command,
                      {{.here = !flags->numerics.empty(),
                        .options = {"--logits", "--reference", "--html", "--overwrite", "--packed",
                                    "--finite", "--pp", "--cp", "--pipeline-model-parallel-layout",
                                    "--sp", "--tp", "--ep", "--etp", "--alignment", "--timeout"},
                        .why = "--numerics certifies operations of this machine, on no mesh"},
                       {.here = flags->html.empty(),
                        .options = {"--overwrite"},
                        .why = "without --html no file is written"}});
    if (!flags->numerics.empty()) return verify_numerics(*flags);
    verify_logits(*flags);
  });
}

}  // namespace ferry::cli
