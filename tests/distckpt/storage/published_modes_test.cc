#include "distckpt/storage/published_modes.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "distckpt/storage/file_io.h"
#include "distckpt/storage/source_files.h"
#include "tests/support/temp_dir.h"

namespace ferry::distckpt {
namespace published_modes_test {

namespace fs = std::filesystem;

class PublishedModesTest : public testing::Test {
 protected:
  fs::path file(const std::string& name, unsigned mode) const {
    const auto path = dir_ / name;
    fs::create_directories(path.parent_path());
    write_text(path, name);
    fs::permissions(path, static_cast<fs::perms>(mode));
    return path;
  }
  void set_folder(const std::string& name, unsigned mode) const {
    fs::permissions(dir_ / name, static_cast<fs::perms>(mode));
  }

  support::TempDir dir_;
  PublishedModes modes_;
};

TEST_F(PublishedModesTest, AreThoseOfNewFilesWhereNothingIsDenied) {
  modes_.narrow(file("a", 0666));
  EXPECT_EQ(modes_.file, 0644U);
  EXPECT_EQ(modes_.lone_file(), 0644U);
}

TEST_F(PublishedModesTest, LackWhatAnyFileDenies) {
  modes_.narrow(file("a", 0640));
  modes_.narrow(file("b", 0604));
  EXPECT_EQ(modes_.file, 0600U);
  EXPECT_EQ(modes_.folder, 0755U);
}

TEST_F(PublishedModesTest, LackWhatFilesDeniedWhenTheyWereRead) {
  const auto path = file("a", 0600);
  SourceFiles files;
  files.add(ReadFile(path));
  fs::permissions(path, static_cast<fs::perms>(0644));
  modes_.narrow(files);
  EXPECT_EQ(modes_.file, 0600U);
}

TEST_F(PublishedModesTest, LookAtAllThatLiesBelowAFolder) {
  file("run/deep/a", 0640);
  set_folder("run", 0750);
  modes_.narrow_all(dir_ / "run");
  EXPECT_EQ(modes_.file, 0640U);
  EXPECT_EQ(modes_.folder, 0750U);
}

TEST_F(PublishedModesTest, LeaveHiddenFoldersOut) {
  file("run/.git/HEAD", 0600);
  file("run/.metadata", 0640);  // a hidden file is one of a checkpoint's
  modes_.narrow_all(dir_ / "run");
  EXPECT_EQ(modes_.file, 0640U);
}

TEST_F(PublishedModesTest, OfAFileAloneAreThoseOfItsFolderToo) {
  const auto path = file("run/a", 0644);
  set_folder("run", 0750);
  modes_.narrow_all(path);
  EXPECT_EQ(modes_.lone_file(), 0640U);
}

TEST_F(PublishedModesTest, FollowALinkToAFile) {
  fs::create_symlink(file("a", 0600), dir_ / "link");
  modes_.narrow(dir_ / "link");
  EXPECT_EQ(modes_.file, 0600U);
}

TEST_F(PublishedModesTest, TakeNothingFromWhatIsNotThere) {
  modes_.narrow_all(dir_ / "gone");
  modes_.narrow_all("s3://bucket/run");
  EXPECT_EQ(modes_.file, 0644U);
}

TEST_F(PublishedModesTest, LetTheOwnerReadALoneFile) {
  modes_.narrow(file("a", 0044));
  EXPECT_EQ(modes_.lone_file(), 0444U);
}

}  // namespace published_modes_test
}  // namespace ferry::distckpt
