#include "converter/option_check.h"

#include <gtest/gtest.h>

#include <string_view>

#include "tests/support/expect.h"

namespace ferry::converter {
namespace option_check_test {

using support::fails;

Checkpoint source_of(Format format, distckpt::DType dtype = distckpt::DType::kBF16) {
  Checkpoint source;
  source.location.format = format;
  source.layout.add_tensor({.name = "w", .dtype = dtype, .shape = {2, 2}});
  return source;
}

::testing::AssertionResult refuses(const ConvertOptions& options,
                                   Format target,
                                   const std::vector<std::string_view>& fragments,
                                   const Checkpoint& source = source_of(Format::kHuggingFace)) {
  return fails(ErrorKind::kUsage, fragments, [&] { require_effective(options, source, target); });
}

TEST(RequireEffective, TakesDefaultsForEveryTarget) {
  for (const auto target : {Format::kHuggingFace, Format::kTorchDist, Format::kArchive})
    EXPECT_NO_THROW(require_effective({}, source_of(Format::kHuggingFace), target));
}

TEST(RequireEffective, ALayoutOfRanksIsMegatrons) {
  const ConvertOptions options{
      .parallel = {.tensor_model_parallel_size = 2, .expert_model_parallel_size = 2}};
  EXPECT_NO_THROW(require_effective(options, source_of(Format::kHuggingFace), Format::kTorchDist));
  EXPECT_TRUE(refuses(options, Format::kHuggingFace,
                      {"--tp, --ep: has no effect", "a Hugging Face checkpoint", "--to megatron"}));
  EXPECT_TRUE(refuses(options, Format::kArchive, {"--tp, --ep: has no effect", "an archive"}));
}

TEST(RequireEffective, ShardsAreNotMegatrons) {
  EXPECT_TRUE(refuses({.max_shard_size = 1 << 20}, Format::kTorchDist, {"--max-shard-size"}));
}

TEST(RequireEffective, TheOptimizerGoesFromMegatronToMegatron) {
  const ConvertOptions options{.no_save_optim = true};
  const auto megatron = source_of(Format::kTorchDist);
  EXPECT_NO_THROW(require_effective(options, megatron, Format::kTorchDist));
  EXPECT_TRUE(refuses(options, Format::kTorchDist, {"--no-save-optim"}));
  EXPECT_TRUE(refuses(options, Format::kHuggingFace, {"--no-save-optim"}, megatron));
}

TEST(RequireEffective, ADryRunResumesNothing) {
  EXPECT_TRUE(refuses({.dry_run = DryRun::kPlan, .resume = true}, Format::kTorchDist,
                      {"--resume: has no effect"}));
}

TEST(RequireEffective, Fp8IsKeptWhereThereIsSome) {
  const ConvertOptions options{.keep_quantized = true};
  EXPECT_NO_THROW(require_effective(
      options, source_of(Format::kHuggingFace, distckpt::DType::kF8E4M3), Format::kHuggingFace));
  EXPECT_TRUE(refuses(options, Format::kHuggingFace,
                      {"--keep-quantized (--keep-fp8): has no effect", "the source holds no FP8"}));
}

TEST(RequireEffective, Fp8HasNoPlaceInMegatron) {
  EXPECT_TRUE(refuses({.keep_quantized = true}, Format::kTorchDist, {"--keep-fp8", "no place"},
                      source_of(Format::kHuggingFace, distckpt::DType::kF8E4M3)));
}

TEST(RequireEffective, Fp8IsNotKeptAndCast) {
  EXPECT_TRUE(refuses({.dtype = distckpt::DType::kF32, .keep_quantized = true},
                      Format::kHuggingFace,
                      {"--keep-quantized (--keep-fp8) and --dtype exclude each other"}));
}

TEST(WeightDtype, HasTheNamesOfTorchAndOfSafetensors) {
  using distckpt::DType;
  for (const auto* name : {"bf16", "bfloat16", "BF16"}) EXPECT_EQ(weight_dtype(name), DType::kBF16);
  for (const auto* name : {"fp16", "float16", "half", "F16"})
    EXPECT_EQ(weight_dtype(name), DType::kF16);
  for (const auto* name : {"fp32", "float32", "float", "F32"})
    EXPECT_EQ(weight_dtype(name), DType::kF32);
  for (const auto* name : {"", "int8", "fp8", "float64"}) EXPECT_FALSE(weight_dtype(name)) << name;
}

}  // namespace option_check_test
}  // namespace ferry::converter
