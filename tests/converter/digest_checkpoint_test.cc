#include "converter/digest_checkpoint.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "converter/convert.h"
#include "tests/support/files.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace digest_checkpoint_test {

class DigestCheckpoint : public testing::Test {
 protected:
  void SetUp() override { support::write_tiny_model({.num_files = 2}, dir_ / "hf", 1); }

  support::TempDir dir_;
};

TEST_F(DigestCheckpoint, HasAllTensorsAndAllFiles) {
  const auto manifest = digest_checkpoint({.path = dir_ / "hf"});
  EXPECT_EQ(manifest.format, "huggingface");
  EXPECT_EQ(manifest.tensors.size(), 21U);
  std::vector<std::string> files;
  for (const auto& file : manifest.files) files.push_back(file.path);
  EXPECT_EQ(files, support::list(dir_ / "hf"));
}

TEST_F(DigestCheckpoint, IsTheModelsInEveryFormat) {
  const auto want = digest_checkpoint({.path = dir_ / "hf", .files = false});
  convert({.from = dir_ / "hf",
           .to = dir_ / "megatron",
           .parallel = {.pipeline_model_parallel_size = 2}});
  const auto found = digest_checkpoint({.path = dir_ / "megatron", .files = false});
  EXPECT_EQ(found.model_digest, want.model_digest);
  EXPECT_TRUE(compare_manifests(want, found, false).empty());
}

TEST_F(DigestCheckpoint, LeavesOutAManifestThatLiesThere) {
  support::write_bytes(dir_ / "hf/manifest", {});
  const auto all = digest_checkpoint({.path = dir_ / "hf"});
  const auto rest = digest_checkpoint({.path = dir_ / "hf", .leave_out = {dir_ / "hf/manifest"}});
  EXPECT_EQ(rest.files.size() + 1, all.files.size());
}

TEST_F(DigestCheckpoint, LeavesOutHiddenFilesThatAreNotItsOwn) {
  const auto before = digest_checkpoint({.path = dir_ / "hf"});
  support::write_bytes(dir_ / "hf/.gitattributes", {});
  EXPECT_EQ(digest_checkpoint({.path = dir_ / "hf"}).files.size(), before.files.size());
}

TEST_F(DigestCheckpoint, OfAPartHasItsTensorsAndNoFiles) {
  const auto part = digest_checkpoint({.path = dir_ / "hf", .part = {{.include = {"*norm*"}}}});
  EXPECT_EQ(part.tensors.size(), 5U);
  EXPECT_TRUE(part.files.empty());
  EXPECT_EQ(part.part, (Part{{.include = {"*norm*"}}}));
}

TEST(ModelDigest, CountsWeightsAlone) {
  const distckpt::ModelTensor weight{.name = "a"};
  const distckpt::ModelTensor derived{.name = "b", .role = distckpt::Role::kDerived};
  const distckpt::Digest one = distckpt::digest_block(distckpt::as_bytes("one"));
  EXPECT_EQ(model_digest({weight, derived}, {one, one}), model_digest({weight}, {one}));
}

}  // namespace digest_checkpoint_test
}  // namespace ferry::converter
