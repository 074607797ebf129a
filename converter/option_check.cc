#include "converter/option_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <string>
#include <string_view>
#include <vector>

#include "converter/families/quantization.h"
#include "distckpt/base/error.h"
#include "distckpt/base/named.h"
#include "distckpt/elements/dequantize.h"

namespace ferry::converter {
namespace {

// The options that ask for another layout than one rank's.
std::vector<std::string_view> layout_flags(const models::ParallelConfig& parallel) {
  const models::ParallelConfig one_rank;
  std::vector<std::string_view> flags;
  const auto add = [&](auto member, std::string_view flag) {
    if (parallel.*member != one_rank.*member) flags.push_back(flag);
  };
  using Parallel = models::ParallelConfig;
  add(&Parallel::tensor_model_parallel_size, "--tp");
  add(&Parallel::pipeline_model_parallel_size, "--pp");
  add(&Parallel::num_layers_in_first_pipeline_stage, "--num-layers-in-first-pipeline-stage");
  add(&Parallel::num_layers_in_last_pipeline_stage, "--num-layers-in-last-pipeline-stage");
  add(&Parallel::virtual_pipeline_model_parallel_size, "--vpp");
  add(&Parallel::account_for_embedding_in_pipeline_split,
      "--account-for-embedding-in-pipeline-split");
  add(&Parallel::account_for_loss_in_pipeline_split, "--account-for-loss-in-pipeline-split");
  add(&Parallel::pipeline_model_parallel_layout, "--pipeline-model-parallel-layout");
  add(&Parallel::expert_model_parallel_size, "--ep");
  add(&Parallel::expert_tensor_parallel_size, "--etp");
  add(&Parallel::make_vocab_size_divisible_by, "--make-vocab-size-divisible-by");
  return flags;
}

std::string_view name_of(Format target) {
  switch (target) {
    case Format::kTorchDist:
      return "a Megatron checkpoint";
    case Format::kArchive:
      return "an archive";
    default:
      return "a Hugging Face checkpoint";
  }
}

void require_used(bool used, std::string_view flag, std::string_view why, std::string hint) {
  if (used) return;
  throw Error(ErrorKind::kUsage, fmt::format("{}: has no effect: {}", flag, why), std::move(hint));
}

}  // namespace

std::optional<distckpt::DType> weight_dtype(std::string_view name) {
  using distckpt::DType;
  constexpr auto kNames = std::to_array<Named<DType>>({{"bf16", DType::kBF16},
                                                       {"fp16", DType::kF16},
                                                       {"fp32", DType::kF32},
                                                       {"bfloat16", DType::kBF16},
                                                       {"float16", DType::kF16},
                                                       {"half", DType::kF16},
                                                       {"f16", DType::kF16},
                                                       {"float32", DType::kF32},
                                                       {"float", DType::kF32},
                                                       {"f32", DType::kF32}});
  std::string lower(name);
  for (auto& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return find_in(kNames, lower);
}

void require_no_layout(const models::ParallelConfig& parallel,
                       std::string_view target,
                       const std::vector<std::string>& given) {
  auto flags = layout_flags(parallel);
  for (const auto& flag : given) {
    if (std::ranges::find(flags, flag) == flags.end()) flags.emplace_back(flag);
  }
  require_used(flags.empty(), fmt::format("{}", fmt::join(flags, ", ")),
               fmt::format("the target is {}, whose tensors are whole", target),
               "leave it away, or write for Megatron with --to megatron");
}

void require_effective(const ConvertOptions& options, const Checkpoint& source, Format target) {
  const bool to_megatron = target == Format::kTorchDist;
  const auto format = source.location.format;
  if (!to_megatron) require_no_layout(options.parallel, name_of(target), options.layout_flags);
  require_used(to_megatron || !options.megatron_layout, "--megatron-layout",
               fmt::format("the target is {}", name_of(target)),
               "leave it away, or write for Megatron with --to megatron");
  require_used(!options.max_shard_size || !to_megatron, "--max-shard-size",
               "a Megatron target has a file for each rank that writes",
               "leave it away, or choose the number of ranks with --tp, --pp and --ep");
  require_used(
      !options.no_save_optim || (to_megatron && format != Format::kHuggingFace &&
                                 format != Format::kTorchSave && format != Format::kArchive),
      "--no-save-optim", "optimizer and RNG go along from Megatron to Megatron alone",
      "leave it away");
  require_used(!options.iteration || to_megatron || !lacks_iterations(options.from), "--iteration",
               "neither source nor target has iterations", "leave it away");
  require_used(!options.resume || options.dry_run == DryRun::kNo, "--resume",
               "a dry run writes nothing that could be gone on with",
               "leave it away, or --dry-run");
  require(
      !options.keep_quantized || !to_megatron, ErrorKind::kUsage,
      "--keep-quantized (--keep-fp8): a Megatron-Core checkpoint has no place for the scales of "
      "blocks");
  require(!options.keep_quantized || !options.dtype, ErrorKind::kUsage,
          "--keep-quantized (--keep-fp8) and --dtype exclude each other");
  require(!options.quantize || !to_megatron, ErrorKind::kUsage,
          "--quantize: a Megatron-Core checkpoint has no place for the scales of blocks");
  require(!options.quantize || !options.keep_quantized, ErrorKind::kUsage,
          "--quantize and --keep-quantized exclude each other");
  const auto is_quantized = [](const distckpt::TensorLayout& tensor) {
    return distckpt::can_dequantize(tensor.dtype) || quantized_weight(tensor.name) != tensor.name;
  };
  require_used(
      !options.keep_quantized || std::ranges::any_of(source.layout.tensors(), is_quantized),
      "--keep-quantized (--keep-fp8)", "the source holds no FP8 or four-bit weights",
      "leave it away");
}

}  // namespace ferry::converter
