// Checkpoints of several ranks that torch saved (tests/data/sharded), and weight files of
// torch.save (tests/data/torch_save).
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>

#include "converter/digest_checkpoint.h"
#include "converter/open/checkpoint.h"
#include "converter/verify.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace sharded_test {

namespace fs = std::filesystem;
using support::fails;
using support::TempDir;
using support::test_data;

const fs::path& hf() {
  static const auto path = test_data("hf_llama") / "hf";
  return path;
}

fs::path copied(const TempDir& dir, const char* name) {
  fs::copy(test_data("sharded") / name, dir / name);
  return dir / name;
}

Checkpoint open_with_config(const fs::path& folder) {
  return open(folder, {.hf_config = hf()});
}

// Writes `to` in the place of every `from`, which is as long.
void replace(const fs::path& path, std::string_view from, std::string_view to) {
  ASSERT_EQ(from.size(), to.size());
  auto text = distckpt::read_text(path);
  ASSERT_NE(text.find(from), std::string::npos) << from;
  for (auto at = text.find(from); at != std::string::npos; at = text.find(from, at))
    text.replace(at, to.size(), to);
  distckpt::write_text(path, text);
}

class Sharded : public testing::TestWithParam<const char*> {};

TEST_P(Sharded, HoldsTheWeightsThatWereSharded) {
  const auto report = verify(
      {.left = hf(), .right = test_data("sharded") / GetParam(), .hf_config = hf(), .threads = 1},
      /*weights_only=*/true);
  EXPECT_EQ(report.num_compared, 39);
  EXPECT_TRUE(report.tensors.empty());
  EXPECT_TRUE(report.unpaired.empty());
}

INSTANTIATE_TEST_SUITE_P(Forms,
                         Sharded,
                         testing::Values("dcp_model", "torch_dcp", "fsdp2_llama"),
                         [](const auto& one) { return std::string(one.param); });

TEST(Dcp, LeavesTrainingStateBesideTheModel) {
  const auto checkpoint = open_with_config(test_data("sharded") / "dcp_model");
  EXPECT_FALSE(checkpoint.megatron_names);
  EXPECT_EQ(checkpoint.tensors.size(), 39U);
  EXPECT_GE(checkpoint.training_state.size(), 5U);
  for (const auto& key : checkpoint.training_state) EXPECT_FALSE(key.starts_with("model.")) << key;
}

TEST(Dcp, WithMegatronsNamesSaysByItsArgumentsWhichModelItIs) {
  const auto checkpoint = open(test_data("sharded") / "torch_dcp");
  EXPECT_TRUE(checkpoint.megatron_names);
  EXPECT_EQ(checkpoint.map.config.family, "llama");
  EXPECT_EQ(checkpoint.map.config.num_layers, 4);
}

TEST(Dcp, AsksForAConfiguration) {
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"holds no config.json", "--hf-config"},
                    [] { open(test_data("sharded") / "dcp_model"); }));
}

TEST(Dcp, NamesAFileThatIsMissing) {
  const TempDir dir;
  const auto folder = copied(dir, "dcp_model");
  fs::remove(folder / "__2_0.distcp");
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"__2_0.distcp"}, [&] { open_with_config(folder); }));
}

TEST(Dcp, NamesMetadataThatIsCutShort) {
  const TempDir dir;
  const auto folder = copied(dir, "dcp_model");
  support::cut(folder / ".metadata", 20000);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {".metadata"}, [&] { open_with_config(folder); }));
}

TEST(Dcp, RefusesNamesOfNoKnownModel) {
  const TempDir dir;
  const auto folder = copied(dir, "dcp_model");
  replace(folder / ".metadata", "embed_tokens", "embed_takens");
  EXPECT_TRUE(fails(ErrorKind::kLayout,
                    {".metadata: no key ends in model.embed_tokens.weight",
                     "only the names of Hugging Face and Megatron-Core are known"},
                    [&] { open_with_config(folder); }));
}

TEST(Dcp, NamesATensorThatNoRuleMaps) {
  const TempDir dir;
  const auto folder = copied(dir, "dcp_model");
  replace(folder / ".metadata", "layers.2.mlp.up_proj", "layers.2.mlp.un_proj");
  EXPECT_TRUE(fails(ErrorKind::kLayout,
                    {"model.layers.2.mlp.un_proj.weight: no rule of the family llama maps it"},
                    [&] { open_with_config(folder); }));
}

TEST(Dcp, OfMegatronThatIsNotWholeIsRefused) {
  const TempDir dir;
  fs::copy(test_data("llama_tp1") / "iter_0000010", dir / "iter_0000010");
  fs::remove(dir / "iter_0000010" / "metadata.json");
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"metadata.json: is missing", "is not whole"},
                    [&] { open_with_config(dir / "iter_0000010"); }));
}

TEST(Fsdp, LeavesTheOptimizersFilesAside) {
  const auto checkpoint = open_with_config(test_data("sharded") / "fsdp2_llama");
  auto state = checkpoint.training_state;
  std::ranges::sort(state);
  ASSERT_EQ(state.size(), 4U);
  EXPECT_EQ(state.back(), "optim_world_size_4_rank_3.pt");
}

TEST(Fsdp, NamesARankThatIsMissing) {
  const TempDir dir;
  const auto folder = copied(dir, "fsdp2_llama");
  fs::remove(folder / "model_world_size_4_rank_2.pt");
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"model_world_size_4_rank_2.pt: is missing"},
                    [&] { open_with_config(folder); }));
}

TEST(Fsdp, RefusesFilesOfTwoWorldSizes) {
  const TempDir dir;
  const auto folder = copied(dir, "fsdp2_llama");
  fs::rename(folder / "model_world_size_4_rank_3.pt", folder / "model_world_size_8_rank_3.pt");
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"holds files of world sizes 4 and 8"},
                    [&] { open_with_config(folder); }));
}

TEST(Fsdp, RefusesARankTwice) {
  const TempDir dir;
  const auto folder = copied(dir, "fsdp2_llama");
  fs::copy_file(folder / "model_world_size_4_rank_0.pt", folder / "model_world_size_4_rank_1.pt",
                fs::copy_options::overwrite_existing);
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"lm_head.weight"},
                    [&] { digest_checkpoint({.path = folder, .hf_config = hf(), .threads = 1}); }));
}

TEST(Fsdp, NamesAFileThatIsCutShort) {
  const TempDir dir;
  const auto folder = copied(dir, "fsdp2_llama");
  support::cut(folder / "model_world_size_4_rank_1.pt", 30000);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"model_world_size_4_rank_1.pt"},
                    [&] { open_with_config(folder); }));
}

TEST(Fsdp, AsksForAConfiguration) {
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"holds no config.json"},
                    [] { open(test_data("sharded") / "fsdp2_llama"); }));
}

fs::path copied_torch_save(const TempDir& dir) {
  fs::copy(test_data("torch_save") / "hf_llama", dir / "hf_llama");
  return dir / "hf_llama";
}

TEST(TorchSave, HoldsTheWeightsThatWereSaved) {
  const auto report =
      verify({.left = hf(), .right = test_data("torch_save") / "hf_llama", .threads = 1},
             /*weights_only=*/true);
  EXPECT_EQ(report.num_compared, 39);
  EXPECT_TRUE(report.tensors.empty());
  EXPECT_TRUE(report.unpaired.empty());
}

TEST(TorchSave, NamesAPartThatTheIndexNamesAndIsMissing) {
  const TempDir dir;
  const auto folder = copied_torch_save(dir);
  fs::remove(folder / "pytorch_model-00002-of-00002.bin");
  EXPECT_TRUE(fails(ErrorKind::kNotFound,
                    {"pytorch_model.bin.index.json: names the file",
                     "pytorch_model-00002-of-00002.bin, which is not there"},
                    [&] { open(folder); }));
}

TEST(TorchSave, SaysThatPartsWithoutAnIndexAreNotWhole) {
  const TempDir dir;
  const auto folder = copied_torch_save(dir);
  fs::remove(folder / "pytorch_model.bin.index.json");
  EXPECT_TRUE(fails(ErrorKind::kNotFound,
                    {"holds parts of pytorch_model.bin, but no pytorch_model.bin.index.json",
                     "the download may be incomplete"},
                    [&] { open(folder); }));
}

TEST(TorchSave, HoldsTheIndexToTheFiles) {
  const TempDir dir;
  const auto folder = copied_torch_save(dir);
  replace(folder / "pytorch_model.bin.index.json", "model.norm.weight", "model.norn.weight");
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"model.nor", "pytorch_model.bin.index.json"},
                    [&] { open(folder); }));
}

TEST(Zarr, OfAnotherBackendIsRefused) {
  const TempDir dir;
  fs::copy(test_data("zarr") / "llama_zarr_tp2pp2", dir / "zarr", fs::copy_options::recursive);
  replace(dir / "zarr" / "iter_0000010" / "metadata.json", "\"zarr\"", "\"arzr\"");
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"sharded_backend is \"arzr\""},
                    [&] { open_with_config(dir / "zarr"); }));
}

TEST(Zarr, HoldsTheWeightsThatWereSaved) {
  const auto report = verify({.left = hf(),
                              .right = test_data("zarr") / "llama_zarr_tp2pp2",
                              .hf_config = hf(),
                              .threads = 1},
                             /*weights_only=*/true);
  EXPECT_EQ(report.num_compared, 39);
  EXPECT_TRUE(report.tensors.empty());
}

}  // namespace sharded_test
}  // namespace ferry::converter
