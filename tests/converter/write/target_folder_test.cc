#include "converter/write/target_folder.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "converter/convert.h"
#include "distckpt/storage/file_io.h"
#include "distckpt/storage/filenames.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace target_folder_test {

namespace fs = std::filesystem;
using support::fails;

class TargetFolder : public testing::Test {
 protected:
  void SetUp() override { support::write_tiny_model({}, dir_ / "hf", 1); }

  ::testing::AssertionResult refuses(const fs::path& target,
                                     std::string_view why,
                                     bool overwrite = false,
                                     Format format = Format::kHuggingFace) const {
    return fails(ErrorKind::kUsage, {why},
                 [&] { refuse_unsafe_target(target, format, dir_ / "hf", overwrite); });
  }
  std::vector<fs::path> replaceable(const std::vector<fs::path>& planned = {}) const {
    return replaceable_files(dir_ / "hf", Format::kHuggingFace, planned);
  }

  support::TempDir dir_;
};

TEST_F(TargetFolder, MayBeNewOrEmpty) {
  fs::create_directory(dir_ / "empty");
  for (const auto* name : {"new", "empty"})
    EXPECT_NO_THROW(refuse_unsafe_target(dir_ / name, Format::kHuggingFace, dir_ / "hf", false));
}

TEST_F(TargetFolder, IsNotTheSource) {
  EXPECT_TRUE(refuses(dir_ / "hf", "is the source, lies in it or holds it", true));
}

TEST_F(TargetFolder, IsNotInTheSource) {
  EXPECT_TRUE(refuses(dir_ / "hf/out", "is the source, lies in it or holds it"));
}

TEST_F(TargetFolder, DoesNotHoldTheSource) {
  EXPECT_TRUE(refuses(dir_.path(), "is the source, lies in it or holds it", true));
}

TEST_F(TargetFolder, IsNoFile) {
  distckpt::write_text(dir_ / "file", "dear");
  EXPECT_TRUE(refuses(dir_ / "file", "is not a folder", true));
}

TEST_F(TargetFolder, IsReplacedIfToldSo) {
  fs::copy(dir_ / "hf", dir_ / "out");
  EXPECT_TRUE(refuses(dir_ / "out", "--overwrite"));
  EXPECT_NO_THROW(refuse_unsafe_target(dir_ / "out", Format::kHuggingFace, dir_ / "hf", true));
}

TEST_F(TargetFolder, IsNotBehindALinkToNothing) {
  fs::create_symlink("nowhere", dir_ / "link");
  EXPECT_TRUE(refuses(dir_ / "link", "symbolic link to nowhere"));
}

TEST_F(TargetFolder, AnIterationHidesNoOtherCheckpoint) {
  fs::copy(dir_ / "hf", dir_ / "other");
  EXPECT_TRUE(
      refuses(dir_ / "other/release", "is a checkpoint of its own", false, Format::kTorchDist));
}

TEST_F(TargetFolder, ResolvesLinksAndSlashes) {
  fs::create_symlink("hf", dir_ / "link");
  EXPECT_EQ(resolve_target(dir_ / "link/"), dir_ / "hf");
}

TEST_F(TargetFolder, AnAddressNamesItsPlacePlainly) {
  for (const auto* address : {"s3://bucket/runs/../out", "s3://bucket/a//b", "s3://bucket/./a"})
    EXPECT_TRUE(fails(ErrorKind::kUsage, {address, "holds an empty name, . or .."},
                      [&] { resolve_target(address); }));
  EXPECT_EQ(resolve_target("s3://bucket/out/"), fs::path("s3://bucket/out"));
}

TEST_F(TargetFolder, IsWritableWhereAFolderCanBeMade) {
  EXPECT_NO_THROW(require_writable(dir_ / "deep/down/out"));
  EXPECT_NO_THROW(require_writable(dir_ / "hf"));
}

TEST_F(TargetFolder, IsNotWritableBelowAFile) {
  EXPECT_TRUE(fails(ErrorKind::kIo, {"config.json/deep/out: cannot be written", "Not a directory"},
                    [&] { require_writable(dir_ / "hf/config.json/deep/out"); }));
}

TEST_F(TargetFolder, IsNotWritableForOtherUsers) {
  const auto before = ::geteuid();
  if (before != 0) GTEST_SKIP() << "only root can be another user";
  fs::permissions(dir_.path(), fs::perms(0755));
  constexpr uid_t kNobody = 65534;
  ASSERT_EQ(::seteuid(kNobody), 0);
  EXPECT_TRUE(fails(ErrorKind::kIo, {"out: cannot be written", "Permission denied"},
                    [&] { require_writable(dir_ / "out"); }));
  EXPECT_TRUE(fails(ErrorKind::kIo, {"Permission denied"}, [&] { require_writable(dir_ / "hf"); }));
  ASSERT_EQ(::seteuid(before), 0);
}

TEST_F(TargetFolder, AllFilesOfAModelMayBeReplaced) {
  std::vector<std::string> names;
  for (const auto& file : replaceable()) names.push_back(file.string());
  std::ranges::sort(names);
  EXPECT_EQ(names, support::list(dir_ / "hf"));
}

TEST_F(TargetFolder, AFileThatNoConversionWritesIsNotReplaced) {
  distckpt::write_text(dir_ / "hf/letter.txt", "dear");
  EXPECT_TRUE(
      fails(ErrorKind::kUsage, {"holds letter.txt", "not overwritten"}, [&] { replaceable(); }));
  EXPECT_NO_THROW(replaceable({"letter.txt"}));
}

TEST_F(TargetFolder, WeightsThatNoIndexNamesAreNotReplaced) {
  for (const auto* name : {"model-best.safetensors", "model-00001-of-00002.safetensors"}) {
    distckpt::write_text(dir_ / "hf" / name, "mine");
    // This conversion may well write a file of that name: it is not the same one.
    EXPECT_TRUE(fails(ErrorKind::kUsage, {"holds", name, "model.safetensors.index.json"},
                      [&] { replaceable({name}); }));
    fs::remove(dir_ / "hf" / name);
  }
}

TEST_F(TargetFolder, WeightsBesideThoseOfTheIndexAreNotReplaced) {
  convert({.from = dir_ / "hf",
           .to = dir_ / "split",
           .format = Format::kHuggingFace,
           .max_shard_size = 4'000});
  const auto split = [&] { return replaceable_files(dir_ / "split", Format::kHuggingFace, {}); };
  EXPECT_GT(split().size(), 4U);
  distckpt::write_text(dir_ / "split/model.safetensors", "mine");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"holds model.safetensors"}, split));
}

TEST_F(TargetFolder, ShardsThatMetadataDoesNotNameAreNotReplaced) {
  convert({.from = dir_ / "hf", .to = dir_ / "megatron"});
  const auto release = dir_ / "megatron/release";
  const auto files = [&] { return replaceable_files(release, Format::kTorchDist, {}); };
  EXPECT_NO_THROW(files());
  distckpt::write_text(release / "__7_0.distcp", "mine");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"holds __7_0.distcp", ".metadata does not name"}, files));
  fs::remove(release / "__7_0.distcp");
  fs::remove(release / ".metadata");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"holds __0_0.distcp"}, files));
}

TEST_F(TargetFolder, FilesOfTwoArchivesAreNotReplaced) {
  convert({.from = dir_ / "hf", .to = dir_ / "archive", .format = Format::kArchive});
  const auto files = [&] { return replaceable_files(dir_ / "archive", Format::kArchive, {}); };
  EXPECT_EQ(files().size(), 1U);
  distckpt::write_text(dir_ / "archive/weights-00002-of-00002.h5", "mine");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"holds weights"}, files));
}

TEST_F(TargetFolder, WeightsOfAnotherProgramAreNotReplaced) {
  fs::create_directory(dir_ / "other");
  const auto files = [&] { return replaceable_files(dir_ / "other", Format::kArchive, {}); };
  // Shorter than a trailer, and longer.
  for (const auto& bytes : {std::string("mine"), std::string(1000, 'h')}) {
    distckpt::write_text(dir_ / "other/weights.h5", bytes);
    EXPECT_TRUE(fails(ErrorKind::kUsage,
                      {"holds weights.h5, which is no file of an archive", "not overwritten"},
                      files));
  }
}

TEST_F(TargetFolder, AFileInPlaceOfOneOfAnArchiveIsNotReplaced) {
  convert({.from = dir_ / "hf",
           .to = dir_ / "archive",
           .format = Format::kArchive,
           .max_shard_size = 4'000});
  const auto files = [&] { return replaceable_files(dir_ / "archive", Format::kArchive, {}); };
  const auto count = files().size();
  ASSERT_GT(count, 1U);
  const auto last = distckpt::shard_store_filename(count - 1, count);
  distckpt::write_text(dir_ / "archive" / last, "mine");
  EXPECT_TRUE(fails(ErrorKind::kUsage,
                    {"holds " + last + ", which is no file of the archive", "not overwritten"},
                    files));
}

TEST_F(TargetFolder, AFolderThatNoConversionWritesIsNotReplaced) {
  fs::create_directory(dir_ / "hf/letters");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"holds letters/"}, [&] { replaceable(); }));
}

TEST_F(TargetFolder, AFolderWithoutWeightsIsNotReplaced) {
  fs::remove(dir_ / "hf/model.safetensors");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"holds no weights"}, [&] { replaceable(); }));
}

}  // namespace target_folder_test
}  // namespace ferry::converter
