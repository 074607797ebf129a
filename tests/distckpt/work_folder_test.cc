#include "distckpt/work_folder.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "distckpt/error.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/temp_dir.h"

namespace ferry::distckpt {
namespace work_folder_test {

namespace fs = std::filesystem;
using support::fails;
using support::list;
using support::TempDir;
using Names = std::vector<std::string>;

// A folder with one file that holds `text`.
void make_checkpoint(const fs::path& folder, std::string_view text) {
  fs::create_directories(folder / "inner");
  write_text(folder / "inner/weights", text);
}

std::string weights(const fs::path& folder) {
  return read_text(folder / "inner/weights");
}

// Goes back when the test ends.
class WorkingDirectory {
 public:
  explicit WorkingDirectory(const fs::path& path) : before_(fs::current_path()) {
    fs::current_path(path);
  }
  ~WorkingDirectory() { fs::current_path(before_); }
  WorkingDirectory(const WorkingDirectory&) = delete;
  WorkingDirectory& operator=(const WorkingDirectory&) = delete;

 private:
  fs::path before_;
};

TEST(WorkFolder, PublishesWhatWasWrittenAndLeavesNothingElse) {
  const TempDir dir;
  {
    WorkFolder work(dir / "out", false);
    EXPECT_EQ(work.path(), dir / ".out.ferry");
    make_checkpoint(work.output(), "new");
    write_text(work.journal(), "log");
    EXPECT_FALSE(fs::exists(dir / "out"));
    work.publish(false);
    EXPECT_EQ(weights(dir / "out"), "new");
  }
  EXPECT_EQ(list(dir.path()), (Names{"out", "out/inner", "out/inner/weights"}));
}

TEST(WorkFolder, MakesMissingParentsAndRemovesThemOnFailure) {
  const TempDir dir;
  fs::create_directory(dir / "there");
  {
    WorkFolder work(dir / "there/a/b/out", false);
    make_checkpoint(work.output(), "half");
    EXPECT_TRUE(fs::exists(dir / "there/a/b/.out.ferry"));
  }
  EXPECT_EQ(list(dir.path()), (Names{"there"}));
  {
    WorkFolder work(dir / "there/a/b/out", false);
    make_checkpoint(work.output(), "whole");
    work.publish(false);
  }
  EXPECT_EQ(weights(dir / "there/a/b/out"), "whole");
  EXPECT_FALSE(fs::exists(dir / "there/a/b/.out.ferry"));
}

TEST(WorkFolder, KeepsAParentThatSomeoneElseUsesMeanwhile) {
  const TempDir dir;
  {
    WorkFolder work(dir / "a/out", false);
    write_text(dir / "a/other", "not ours");
  }
  EXPECT_EQ(list(dir.path()), (Names{"a", "a/other"}));
}

TEST(WorkFolder, AcceptsAnEmptyFolderAsTarget) {
  const TempDir dir;
  fs::create_directory(dir / "out");
  {
    WorkFolder work(dir / "out", false);
    make_checkpoint(work.output(), "new");
    work.publish(false);
  }
  EXPECT_EQ(weights(dir / "out"), "new");
  EXPECT_FALSE(fs::exists(dir / ".out.ferry"));
}

TEST(WorkFolder, RefusesAnOccupiedTargetAndLeavesItAlone) {
  const TempDir dir;
  make_checkpoint(dir / "out", "old");
  write_text(dir / "file", "old");
  for (const char* name : {"out", "file"}) {
    WorkFolder work(dir / name, false);
    make_checkpoint(work.output(), "new");
    EXPECT_TRUE(fails(ErrorKind::kUsage, {name, "exists already"}, [&] { work.publish(false); }));
  }
  EXPECT_EQ(weights(dir / "out"), "old");
  EXPECT_EQ(read_text(dir / "file"), "old");
  EXPECT_EQ(list(dir.path()), (Names{"file", "out", "out/inner", "out/inner/weights"}));
}

TEST(WorkFolder, OverwriteExchangesOldAndNew) {
  const TempDir dir;
  make_checkpoint(dir / "out", "old");
  {
    WorkFolder work(dir / "out", false);
    make_checkpoint(work.output(), "new");
    work.publish(true);
    EXPECT_EQ(weights(dir / "out"), "new");
    EXPECT_EQ(weights(work.output()), "old");  // whole until the very end
  }
  EXPECT_EQ(list(dir.path()), (Names{"out", "out/inner", "out/inner/weights"}));
}

TEST(WorkFolder, ARunThatFailsLeavesTheOldTargetAlone) {
  const TempDir dir;
  make_checkpoint(dir / "out", "old");
  {
    const WorkFolder work(dir / "out", false);
    make_checkpoint(work.output(), "half");
  }
  EXPECT_EQ(weights(dir / "out"), "old");
  EXPECT_EQ(list(dir.path()), (Names{"out", "out/inner", "out/inner/weights"}));
}

TEST(WorkFolder, IsOfOneRunAtATime) {
  const TempDir dir;
  {
    const WorkFolder first(dir / "out", false);
    make_checkpoint(first.output(), "first");
    for (const bool resume : {false, true}) {
      EXPECT_TRUE(fails(ErrorKind::kUsage, {"out", "another run", "hint"},
                        [&] { WorkFolder(dir / "out", resume); }));
    }
    EXPECT_EQ(weights(first.output()), "first");
    const WorkFolder neighbour(dir / "other", false);
  }
  EXPECT_NO_THROW(WorkFolder(dir / "out", false));
}

TEST(WorkFolder, RemovesWhatAnInterruptedRunLeft) {
  const TempDir dir;
  make_checkpoint(dir / ".out.ferry/output", "left");
  write_text(dir / ".out.ferry/journal", "left");
  const WorkFolder work(dir / "out", false);
  EXPECT_EQ(list(work.path()), (Names{"output"}));
}

TEST(WorkFolder, ResumesWhatAnInterruptedRunLeft) {
  const TempDir dir;
  {
    WorkFolder work(dir / "out", false);
    make_checkpoint(work.output(), "half");
    write_text(work.journal(), "log");
    work.keep();
  }
  EXPECT_FALSE(fs::exists(dir / "out"));
  {
    WorkFolder work(dir / "out", true);
    EXPECT_EQ(weights(work.output()), "half");
    EXPECT_EQ(read_text(work.journal()), "log");
    work.publish(false);
  }
  EXPECT_EQ(list(dir.path()), (Names{"out", "out/inner", "out/inner/weights"}));
}

TEST(WorkFolder, TakesARelativeTargetOfOneName) {
  const TempDir dir;
  const WorkingDirectory inside(dir.path());
  {
    WorkFolder work("out", false);
    make_checkpoint(work.output(), "new");
    work.publish(false);
  }
  EXPECT_EQ(list(dir.path()), (Names{"out", "out/inner", "out/inner/weights"}));
  replace_text("tracker", "10");
  EXPECT_EQ(read_text(dir / "tracker"), "10");
}

TEST(WorkFolder, TakesATargetThatEndsInASlash) {
  const TempDir dir;
  {
    WorkFolder work(dir / "out/", false);
    EXPECT_EQ(work.path(), dir / ".out.ferry");
    make_checkpoint(work.output(), "new");
    work.publish(false);
  }
  EXPECT_EQ(list(dir.path()), (Names{"out", "out/inner", "out/inner/weights"}));
}

TEST(WorkFolder, SaysWhereItCannotBeMade) {
  const TempDir dir;
  write_text(dir / "file", "");
  EXPECT_TRUE(fails(ErrorKind::kIo, {"file"}, [&] { WorkFolder(dir / "file/out", false); }));
  write_text(dir / ".out.ferry", "");
  EXPECT_TRUE(fails(ErrorKind::kIo, {".out.ferry"}, [&] { WorkFolder(dir / "out", false); }));
}

TEST(ReplaceText, ExchangesTheWholeFile) {
  const TempDir dir;
  replace_text(dir / "tracker", "10");
  EXPECT_EQ(read_text(dir / "tracker"), "10");
  replace_text(dir / "tracker", "release");
  EXPECT_EQ(read_text(dir / "tracker"), "release");
  EXPECT_EQ(list(dir.path()), (Names{"tracker"}));
  EXPECT_TRUE(
      fails(ErrorKind::kNotFound, {"absent"}, [&] { replace_text(dir / "absent/tracker", "10"); }));
}

}  // namespace work_folder_test
}  // namespace ferry::distckpt
