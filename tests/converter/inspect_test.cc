#include "converter/inspect.h"

#include <gtest/gtest.h>

#include "converter/convert.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace inspect_test {

class Inspect : public testing::Test {
 protected:
  void SetUp() override { support::write_tiny_model({.num_files = 2}, dir_ / "hf", 1); }
  InspectReport inspect_folder(std::string_view name) const {
    return inspect(dir_ / name, std::nullopt, {});
  }
  void convert_to_megatron() const {
    convert(
        {.from = dir_ / "hf", .to = dir_ / "out", .parallel = {.tensor_model_parallel_size = 2}});
  }

  support::TempDir dir_;
};

TEST_F(Inspect, CountsTheParametersOfHuggingFace) {
  const auto report = inspect_folder("hf");
  EXPECT_EQ(report.tensors.size(), 21U);
  EXPECT_EQ(report.num_parameters, report.num_stored);
  EXPECT_EQ(report.num_bytes, 2 * report.num_stored);
  EXPECT_EQ(report.elements_by_dtype.at("bf16"), report.num_stored);
  EXPECT_EQ(report.chunks_by_file.size(), 2U);
}

TEST_F(Inspect, SaysWithWhichRanksMegatronSaved) {
  convert_to_megatron();
  const auto report = inspect_folder("out");
  ASSERT_TRUE(report.saved_with.has_value());
  EXPECT_EQ(report.saved_with->tensor_model_parallel_size, 2);
  EXPECT_TRUE(report.has_sidecar);
  EXPECT_EQ(report.config->family, "llama");
}

TEST_F(Inspect, CountsThePaddingOfMegatronAsStored) {
  convert_to_megatron();
  const auto report = inspect_folder("out");
  constexpr std::int64_t kPaddedRows = 256 - 50;  // of the embedding and of the head, 16 wide
  EXPECT_EQ(report.num_stored, *report.num_parameters + 2 * kPaddedRows * 16);
}

TEST_F(Inspect, ReadsTheSameModelFromAnArchive) {
  convert({.from = dir_ / "hf", .to = dir_ / "h5", .format = Format::kArchive});
  EXPECT_EQ(inspect_folder("h5").num_parameters, inspect_folder("hf").num_parameters);
}

TEST_F(Inspect, ShowsTensorsOfAModelThatIsNotKnown) {
  distckpt::write_text(dir_ / "hf/config.json", R"({"model_type": "other"})");
  const auto report = inspect_folder("hf");
  ASSERT_TRUE(report.config.has_value()) << report.config_problem;
  EXPECT_EQ(report.config->family, "other");
  EXPECT_TRUE(report.only_sizes);
  EXPECT_EQ(report.tensors.size(), 21U);
}

TEST_F(Inspect, RefusesAPointerOfGitLfs) {
  distckpt::write_text(dir_ / "hf/model-00001-of-00002.safetensors",
                       "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n");
  EXPECT_TRUE(support::fails(ErrorKind::kCorrupt, {"00001-of-00002", "pointer of git-lfs"},
                             [&] { inspect_folder("hf"); }));
}

TEST_F(Inspect, RefusesAConfigurationThatIsNotThere) {
  convert_to_megatron();
  EXPECT_TRUE(support::fails(ErrorKind::kNotFound, {"nowhere: is not a folder"},
                             [&] { inspect(dir_ / "out", std::nullopt, dir_ / "nowhere"); }));
}

TEST_F(Inspect, RefusesAnotherConfigurationForHuggingFace) {
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"has its own config.json"},
                             [&] { inspect(dir_ / "hf", std::nullopt, dir_ / "hf"); }));
}

}  // namespace inspect_test
}  // namespace ferry::converter
