// Files of ranks that Megatron-LM saved (tests/data/legacy).
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "converter/digest_checkpoint.h"
#include "converter/open/checkpoint.h"
#include "converter/open/rank_files.h"
#include "converter/verify.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace legacy_test {

namespace fs = std::filesystem;
using support::fails;
using support::TempDir;
using support::test_data;

constexpr const char* kFile = "model_optim_rng.pt";

struct SavedBy {
  const char* folder;  // below legacy/
  const char* model;   // that it was made of
};

class Legacy : public testing::TestWithParam<SavedBy> {};

TEST_P(Legacy, HoldsTheWeightsThatWereSaved) {
  const auto hf = test_data(GetParam().model) / "hf";
  const auto report = verify(
      {.left = hf, .right = test_data("legacy") / GetParam().folder, .hf_config = hf, .threads = 1},
      /*weights_only=*/true);
  EXPECT_TRUE(report.tensors.empty());
  EXPECT_TRUE(report.unpaired.empty());
  EXPECT_GT(report.num_compared, 20);
}

INSTANTIATE_TEST_SUITE_P(Cases,
                         Legacy,
                         testing::Values(SavedBy{"llama_legacy_tp2pp2", "hf_llama"},
                                         SavedBy{"llama_legacy_local_pp2", "hf_llama"},
                                         SavedBy{"qwen2_tied_legacy_pp2", "hf_qwen2_tied"},
                                         SavedBy{"mixtral_legacy_ep2", "hf_mixtral"},
                                         SavedBy{"mixtral_legacy_local_ep2", "hf_mixtral"},
                                         SavedBy{"qwen2moe_legacy_tp2ep2", "hf_qwen2_moe"},
                                         SavedBy{"deepseek_v3_legacy_tp2pp2", "hf_deepseek_v3"}),
                         [](const auto& one) { return std::string(one.param.folder); });

// One iteration's folder of a copy, to be damaged.
fs::path copied(const TempDir& dir) {
  const auto folder = dir / "iter_0000010";
  fs::copy(test_data("legacy") / "llama_legacy_tp2pp2" / "iter_0000010", folder,
           fs::copy_options::recursive);
  return folder;
}

TEST(RankFiles, CountLayersOnFromStageToStage) {
  const auto ranks = read_rank_files(test_data("legacy") / "llama_legacy_tp2pp2" / "iter_0000010");
  EXPECT_EQ(ranks.parallel.tensor_model_parallel_size, 2);
  EXPECT_EQ(ranks.parallel.pipeline_model_parallel_size, 2);
  ASSERT_EQ(ranks.files.size(), 4U);
  // Two layers of each stage: the last stage's second is the model's fourth.
  const auto& slices = ranks.tensors.at("decoder.layers.3.mlp.linear_fc2.weight");
  ASSERT_EQ(slices.size(), 2U);
  for (const auto& slice : slices) EXPECT_EQ(ranks.files[slice.file].pp, 1);
  EXPECT_FALSE(ranks.tensors.contains("decoder.layers.4.mlp.linear_fc2.weight"));
}

TEST(RankFiles, SayByTheirArgumentsWhichModelItIs) {
  const auto checkpoint = open(test_data("legacy") / "llama_legacy_tp2pp2");
  EXPECT_EQ(checkpoint.map.config.family, "llama");
  EXPECT_EQ(checkpoint.map.config.num_layers, 4);
  EXPECT_TRUE(checkpoint.megatron_names);
  EXPECT_FALSE(checkpoint.hf.has_value());
}

TEST(RankFiles, NameARankThatIsMissing) {
  const TempDir dir;
  const auto folder = copied(dir);
  fs::remove_all(folder / "mp_rank_01_000");
  EXPECT_TRUE(fails(ErrorKind::kNotFound,
                    {"tensor parallel rank 1, pipeline stage 0", "is missing", "TP2 PP2"},
                    [&] { read_rank_files(folder); }));
}

TEST(RankFiles, NameAFileThatIsMissing) {
  const TempDir dir;
  const auto folder = copied(dir);
  fs::remove(folder / "mp_rank_01_000" / kFile);
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"mp_rank_01_000/model_optim_rng.pt: is missing"},
                    [&] { read_rank_files(folder); }));
}

TEST(RankFiles, RefuseARankBeyondTheLayout) {
  const TempDir dir;
  const auto folder = copied(dir);
  fs::copy(folder / "mp_rank_01_001", folder / "mp_rank_02_001", fs::copy_options::recursive);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"mp_rank_02_001", "is beyond TP2 PP2"},
                    [&] { read_rank_files(folder); }));
}

TEST(RankFiles, RefuseAFolderThatNamesOtherAxes) {
  const TempDir dir;
  const auto folder = copied(dir);
  fs::rename(folder / "mp_rank_00_000", folder / "mp_rank_00");
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"mp_rank_00/", "has 1 ranks", "make 2"},
                    [&] { read_rank_files(folder); }));
}

TEST(RankFiles, RefuseFilesOfTwoLayouts) {
  const TempDir dir;
  const auto folder = copied(dir);
  fs::copy_file(
      test_data("legacy") / "llama_legacy_local_pp2" / "iter_0000010" / "mp_rank_00_001" / kFile,
      folder / "mp_rank_01_001" / kFile, fs::copy_options::overwrite_existing);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt,
                    {"mp_rank_01_001", "(TP1 PP2 EP1)", "mp_rank_00_000", "(TP2 PP2 EP1)"},
                    [&] { read_rank_files(folder); }));
}

TEST(RankFiles, NameATensorThatNoStageHolds) {
  const TempDir dir;
  const auto folder = copied(dir);
  for (const auto* rank : {"mp_rank_00_001", "mp_rank_01_001"}) {
    auto first = std::string(rank);
    first.back() = '0';
    fs::copy_file(folder / first / kFile, folder / rank / kFile,
                  fs::copy_options::overwrite_existing);
  }
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"decoder.final_layernorm.weight: is missing"},
                    [&] { open(folder, {.hf_config = test_data("hf_llama") / "hf"}); }));
}

TEST(RankFiles, NameAFileThatIsCutShort) {
  const TempDir dir;
  const auto folder = copied(dir);
  const auto path = folder / "mp_rank_01_001" / kFile;
  support::cut(path, static_cast<std::int64_t>(fs::file_size(path)) / 2);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"mp_rank_01_001/model_optim_rng.pt"},
                    [&] { read_rank_files(folder); }));
}

TEST(RankFiles, FindAFlippedBitByTheChecksum) {
  const TempDir dir;
  const auto folder = copied(dir);
  const auto path = folder / "mp_rank_01_001" / kFile;
  const auto ranks = read_rank_files(folder);
  const auto& item = ranks.tensors.at("decoder.layers.3.mlp.linear_fc2.weight").back().item;
  support::corrupt(path, item.payload_offset + 5);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"CRC-32", "mp_rank_01_001"}, [&] {
    digest_checkpoint({.path = folder, .hf_config = test_data("hf_llama") / "hf", .threads = 1});
  }));
}

}  // namespace legacy_test
}  // namespace ferry::converter
