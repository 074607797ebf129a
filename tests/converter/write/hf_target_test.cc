#include "converter/write/hf_target.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "converter/convert.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/files.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/temp_dir.h"
#include "tests/support/trees.h"

namespace ferry::converter {
namespace hf_target_test {

using Names = std::vector<std::string>;

class HfTarget : public testing::Test {
 protected:
  void SetUp() override { support::write_tiny_model({.num_files = 2}, dir_ / "hf", 1); }

  // The files of the target's tensors.
  Names files(std::optional<std::int64_t> max_shard_size = {}) const {
    const auto source = open(dir_ / "hf");
    const auto target = make_hf_target(source, source.tensors, {}, max_shard_size, dir_ / "out");
    Names names;
    for (const auto& storage : target->layout().storages())
      names.push_back(distckpt::file_of(storage)->filename().string());
    return names;
  }
  void write(ConvertOptions options) const {
    options.from = dir_ / "hf";
    options.to = dir_ / "out";
    options.format = Format::kHuggingFace;
    convert(options);
  }

  support::TempDir dir_;
};

TEST_F(HfTarget, KeepsTheSplitOfTheSource) {
  EXPECT_EQ(files(),
            (Names{"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}));
}

TEST_F(HfTarget, SplitsAnewByTheLargestFile) {
  EXPECT_EQ(files(1 << 20), Names{"model.safetensors"});
  EXPECT_GT(files(4096).size(), 2U);
}

TEST_F(HfTarget, NoFileIsLargerThanAsked) {
  write({.max_shard_size = 4096});
  for (const auto& header : read_hf_folder(dir_ / "out", Links::kAll).headers) {
    std::int64_t bytes = 0;
    for (const auto& entry : header.entries) bytes += entry.end - entry.begin;
    EXPECT_LE(bytes, 4096) << header.filename;
  }
}

TEST_F(HfTarget, WritesTheSourcesBytes) {
  write({});
  EXPECT_TRUE(support::same_tree(dir_ / "hf", dir_ / "out"));
}

TEST_F(HfTarget, TheConfigurationSaysACast) {
  write({.dtype = distckpt::DType::kF32});
  EXPECT_NE(distckpt::read_text(dir_ / "out/config.json").find("\"float32\""), std::string::npos);
  for (const auto& tensor : open(dir_ / "out").tensors)
    EXPECT_EQ(tensor.dtype, distckpt::DType::kF32) << tensor.name;
}

TEST_F(HfTarget, NamesTheFilesThatTravel) {
  const auto source = open(dir_ / "hf");
  const auto target = make_hf_target(source, source.tensors, {}, {}, dir_ / "out");
  Names names;
  for (const auto& file : target->files(dir_ / "out")) names.push_back(file.string());
  std::ranges::sort(names);
  EXPECT_EQ(names, support::list(dir_ / "hf"));
}

}  // namespace hf_target_test
}  // namespace ferry::converter
