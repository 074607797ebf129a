#include "distckpt/storage/held_folder.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "distckpt/base/error.h"
#include "tests/support/expect.h"
#include "tests/support/temp_dir.h"

namespace ferry::distckpt {
namespace held_folder_test {

namespace fs = std::filesystem;
using support::fails;

void write(const fs::path& path, const std::string& text) {
  std::ofstream(path) << text;
}

std::string text_of(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(HeldFolder, LeadsToTheSameFolderWhereverItIsMoved) {
  const support::TempDir dir;
  fs::create_directory(dir.path() / "work");
  HeldFolder held(dir.path() / "work");
  held.hold(*open_folder(AT_FDCWD, dir.path() / "work"));
  fs::rename(dir.path() / "work", dir.path() / "moved");
  fs::create_directory(dir.path() / "work");
  write(held.path() / "a", "one");
  EXPECT_EQ(text_of(dir.path() / "moved/a"), "one");
  EXPECT_TRUE(fs::is_empty(dir.path() / "work"));
}

TEST(HeldFolder, HoldsNothingBeforeItIsTold) {
  const support::TempDir dir;
  const HeldFolder held(dir.path() / "work");
  EXPECT_FALSE(std::ofstream(held.path() / "a").is_open());
}

TEST(HeldFolder, IsCalledByItsNameInErrors) {
  const support::TempDir dir;
  fs::create_directory(dir.path() / "work");
  HeldFolder held(dir.path() / "work");
  held.hold(*open_folder(AT_FDCWD, dir.path() / "work"));
  const auto longer = held.path().string() + "0/x";  // another descriptor's
  try {
    held.with_its_name([&] {
      Error error(ErrorKind::kIo, held.path().string() + "/a: is full", "look at " + longer);
      error.add_context("writing " + held.path().string() + "/b");
      throw error;
    });
    FAIL();
  } catch (const Error& error) {
    const auto name = (dir.path() / "work").string();
    EXPECT_EQ(std::string(error.what()), name + "/a: is full");
    EXPECT_EQ(error.hint(), "look at " + longer);
    EXPECT_EQ(error.context().at(0), "writing " + name + "/b");
  }
}

TEST(OpenFolder, DoesNotFollowALinkNorTakeAFile) {
  const support::TempDir dir;
  fs::create_directory(dir.path() / "real");
  fs::create_directory_symlink("real", dir.path() / "link");
  write(dir.path() / "file", "");
  EXPECT_TRUE(open_folder(AT_FDCWD, dir.path() / "real").has_value());
  EXPECT_FALSE(open_folder(AT_FDCWD, dir.path() / "link").has_value());
  EXPECT_FALSE(open_folder(AT_FDCWD, dir.path() / "file").has_value());
  EXPECT_FALSE(open_folder(AT_FDCWD, dir.path() / "absent").has_value());
}

TEST(WalkFolder, VisitsFoldersBeforeWhatTheyHoldAndNoLinks) {
  const support::TempDir dir;
  fs::create_directories(dir.path() / "b/c");
  write(dir.path() / "b/c/file", "");
  write(dir.path() / "a", "");
  fs::create_directory_symlink("..", dir.path() / "b/up");
  const auto folder = open_folder(AT_FDCWD, dir.path());
  std::string seen;
  walk_folder(folder->get(), [&](const fs::path& path, const FolderEntry& entry) {
    seen += path.string() + (entry.is_folder() ? "/ " : entry.is_file() ? " " : "@ ");
  });
  EXPECT_EQ(seen, "a b/ b/c/ b/c/file b/up@ ");
}

}  // namespace held_folder_test
}  // namespace ferry::distckpt
