#include "converter/write/megatron_target.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "converter/convert.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace megatron_target_test {

std::vector<std::string> files(const support::TinyModel& model,
                               const models::ParallelConfig& parallel) {
  const support::TempDir dir;
  support::write_tiny_model(model, dir / "hf", 1);
  const auto source = open(dir / "hf");
  const auto target =
      make_megatron_target(source, source.tensors, {.parallel = parallel}, dir / "out");
  std::vector<std::string> names;
  for (const auto& storage : target->layout().storages())
    names.push_back(distckpt::file_of(storage)->filename().string());
  return names;
}

TEST(MegatronTarget, HasAFileForEachModelParallelRank) {
  EXPECT_EQ(
      files({}, {.tensor_model_parallel_size = 2, .pipeline_model_parallel_size = 2}),
      (std::vector<std::string>{"__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "__3_0.distcp"}));
}

TEST(MegatronTarget, HasAFileForEachRankOfExperts) {
  EXPECT_EQ(files({.family = "mixtral"}, {.expert_model_parallel_size = 4}).size(), 4U);
}

TEST(MegatronTarget, TheConfigurationSaysACast) {
  const support::TempDir dir;
  support::write_tiny_model({}, dir / "hf", 3);
  convert({.from = dir / "hf",
           .to = dir / "megatron",
           .format = Format::kTorchDist,
           .dtype = distckpt::DType::kF32});
  convert({.from = dir / "megatron", .to = dir / "back", .format = Format::kHuggingFace});
  const auto said = distckpt::read_text(dir / "back/config.json");
  EXPECT_NE(said.find("\"float32\""), std::string::npos) << said;
  EXPECT_EQ(said.find("\"bfloat16\""), std::string::npos) << said;
}

TEST(MegatronTarget, RanksThatKeepTheirNumbersKeepTheirRng) {
  const TrainingState training{
      .parallel = {.tensor_model_parallel_size = 2, .pipeline_model_parallel_size = 2},
      .rng = {{}}};
  EXPECT_TRUE(keeps_rng(training, training.parallel));
  EXPECT_FALSE(
      keeps_rng(training, {.tensor_model_parallel_size = 4, .pipeline_model_parallel_size = 1}));
}

}  // namespace megatron_target_test
}  // namespace ferry::converter
