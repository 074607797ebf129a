#include "converter/conversion_plan.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace conversion_plan_test {

namespace fs = std::filesystem;
using support::fails;

class ConversionPlan : public testing::Test {
 protected:
  void SetUp() override { support::write_tiny_model({.num_files = 2}, dir_ / "hf", 1); }

  ConvertOptions to_ranks(int tensor_parallel) const {
    return {.from = dir_ / "hf",
            .to = dir_ / "out",
            .parallel = {.tensor_model_parallel_size = tensor_parallel}};
  }
  static distckpt::Digest fingerprint_of(const ConvertOptions& options, const fs::path& folder) {
    const auto opened = open_conversion(options);
    return fingerprint(opened, plan_conversion(opened, options, folder));
  }

  support::TempDir dir_;
};

TEST_F(ConversionPlan, HuggingFaceBecomesMegatronsReleaseByDefault) {
  const auto opened = open_conversion({.from = dir_ / "hf", .to = dir_ / "out"});
  EXPECT_EQ(opened.format, Format::kTorchDist);
  EXPECT_EQ(opened.target, dir_ / "out/release");
  EXPECT_FALSE(opened.published);
}

TEST_F(ConversionPlan, AnIterationThatIsAskedForNamesTheFolder) {
  const auto opened = open_conversion(
      {.from = dir_ / "hf", .to = dir_ / "out", .iteration = distckpt::Iteration{10}});
  EXPECT_EQ(opened.target, dir_ / "out/iter_0000010");
}

TEST_F(ConversionPlan, MegatronBecomesHuggingFaceByDefault) {
  convert({.from = dir_ / "hf", .to = dir_ / "megatron"});
  const auto opened = open_conversion({.from = dir_ / "megatron", .to = dir_ / "out"});
  EXPECT_EQ(opened.format, Format::kHuggingFace);
  EXPECT_EQ(opened.target, dir_ / "out");
}

TEST_F(ConversionPlan, TensorsHaveTheDtypeThatIsAskedFor) {
  const auto opened =
      open_conversion({.from = dir_ / "hf", .to = dir_ / "out", .dtype = distckpt::DType::kF32});
  for (const auto& tensor : opened.tensors)
    EXPECT_EQ(tensor.dtype, distckpt::DType::kF32) << tensor.name;
}

TEST_F(ConversionPlan, AnArchiveIsWrittenByOneProcess) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"--to h5", "--no-ranks"}, [&] {
    open_conversion({.from = dir_ / "hf",
                     .to = dir_ / "out",
                     .format = Format::kArchive,
                     .job = {.rank = 0, .size = 2}});
  }));
}

TEST_F(ConversionPlan, KnowsTheFilesOfEachRank) {
  const auto options = to_ranks(2);
  const auto planned = plan_conversion(open_conversion(options), options, dir_ / "folder");
  ASSERT_EQ(planned.tensor_files.size(), 2U);
  EXPECT_EQ(planned.tensor_files[1].name, "__1_0.distcp");
  EXPECT_GT(planned.tensor_files[1].bytes, 0);
  EXPECT_FALSE(fs::exists(dir_ / "folder"));
}

TEST_F(ConversionPlan, TheFingerprintDoesNotDependOnTheFolder) {
  EXPECT_EQ(fingerprint_of(to_ranks(2), dir_ / "a"), fingerprint_of(to_ranks(2), dir_ / "b"));
}

TEST_F(ConversionPlan, TheFingerprintIsOfTheLayout) {
  EXPECT_NE(fingerprint_of(to_ranks(1), dir_ / "a"), fingerprint_of(to_ranks(2), dir_ / "a"));
}

TEST_F(ConversionPlan, TheFingerprintIsOfTheSourcesFiles) {
  const auto before = fingerprint_of(to_ranks(1), dir_ / "a");
  const auto file = dir_ / "hf/model-00001-of-00002.safetensors";
  fs::last_write_time(file, fs::last_write_time(file) - std::chrono::seconds(1));
  EXPECT_NE(fingerprint_of(to_ranks(1), dir_ / "a"), before);
}

TEST_F(ConversionPlan, TheSameSourceIsTheSame) {
  const auto options = to_ranks(1);
  EXPECT_NO_THROW(require_same_source(open_conversion(options), options));
}

TEST_F(ConversionPlan, ASourceThatWasWrittenAgainIsAnother) {
  const auto options = to_ranks(1);
  const auto opened = open_conversion(options);
  distckpt::write_text(dir_ / "hf/tokenizer.json", "{}");
  EXPECT_TRUE(
      fails(ErrorKind::kIo, {"tokenizer.json"}, [&] { require_same_source(opened, options); }));
}

}  // namespace conversion_plan_test
}  // namespace ferry::converter
