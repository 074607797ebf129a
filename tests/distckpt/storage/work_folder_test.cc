#include "distckpt/storage/work_folder.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"
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

// The files that make_checkpoint() makes.
const WorkFolder::Names kFiles{"inner/weights"};

// May replace any folder.
const auto kAnything = [](const fs::path&) { return kFiles; };

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
    EXPECT_TRUE(fs::equivalent(work.path(), dir / ".out.ferry"));
    work.expect(kFiles);
    make_checkpoint(work.output(), "new");
    write_text(work.journal(), "log");
    EXPECT_FALSE(fs::exists(dir / "out"));
    work.publish({});
    EXPECT_EQ(weights(dir / "out"), "new");
  }
  EXPECT_EQ(list(dir.path()), (Names{"out", "out/inner", "out/inner/weights"}));
}

TEST(WorkFolder, MakesMissingParentsAndRemovesThemOnFailure) {
  const TempDir dir;
  fs::create_directory(dir / "there");
  {
    WorkFolder work(dir / "there/a/b/out", false);
    work.expect(kFiles);
    make_checkpoint(work.output(), "half");
    EXPECT_TRUE(fs::exists(dir / "there/a/b/.out.ferry"));
  }
  EXPECT_EQ(list(dir.path()), (Names{"there"}));
  {
    WorkFolder work(dir / "there/a/b/out", false);
    work.expect(kFiles);
    make_checkpoint(work.output(), "whole");
    work.publish({});
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
    work.expect(kFiles);
    make_checkpoint(work.output(), "new");
    work.publish({});
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
    work.expect(kFiles);
    make_checkpoint(work.output(), "new");
    EXPECT_TRUE(fails(ErrorKind::kUsage, {name, "exists already"}, [&] { work.publish({}); }));
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
    work.expect(kFiles);
    make_checkpoint(work.output(), "new");
    work.publish(kAnything);
    EXPECT_EQ(weights(dir / "out"), "new");
    EXPECT_EQ(weights(work.output()), "old");  // whole until the very end
  }
  EXPECT_EQ(list(dir.path()), (Names{"out", "out/inner", "out/inner/weights"}));
}

TEST(WorkFolder, ARunThatFailsLeavesTheOldTargetAlone) {
  const TempDir dir;
  make_checkpoint(dir / "out", "old");
  {
    WorkFolder work(dir / "out", false);
    work.expect(kFiles);
    make_checkpoint(work.output(), "half");
  }
  EXPECT_EQ(weights(dir / "out"), "old");
  EXPECT_EQ(list(dir.path()), (Names{"out", "out/inner", "out/inner/weights"}));
}

TEST(WorkFolder, IsOfOneRunAtATime) {
  const TempDir dir;
  {
    WorkFolder first(dir / "out", false);
    first.expect(kFiles);
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

// Leaves a run behind that was interrupted.
void interrupt(const fs::path& target) {
  WorkFolder work(target, false);
  work.expect(kFiles);
  make_checkpoint(work.output(), "half");
  write_text(work.journal(), "log");
  work.keep();
}

TEST(WorkFolder, RemovesWhatAnInterruptedRunLeft) {
  const TempDir dir;
  interrupt(dir / "out");
  const WorkFolder work(dir / "out", false);
  EXPECT_EQ(list(work.path()), (Names{"ferry-work", "output"}));
}

TEST(WorkFolder, BeginsAnewWhereBytesWereDamaged) {
  const TempDir dir;
  interrupt(dir / "out");
  {
    WorkFolder work(dir / "out", true);
    mark_damaged(work.folder());
    work.keep();
  }
  const WorkFolder work(dir / "out", true);
  EXPECT_EQ(list(work.path()), (Names{"ferry-work", "output"}));
}

TEST(WorkFolder, IsClosedToOthers) {
  const TempDir dir;
  const WorkFolder work(dir / "a/out", false);
  EXPECT_EQ(fs::status(dir / "a/.out.ferry").permissions(), fs::perms::owner_all);
  EXPECT_EQ(fs::status(dir / "a").permissions(), fs::perms::owner_all);
}

TEST(WorkFolder, RefusesOneThatIsNotOurs) {
  const TempDir dir;
  make_checkpoint(dir / "victim", "mine");
  fs::create_directory_symlink("victim", dir / ".link.ferry");
  make_checkpoint(dir / ".foreign.ferry/output", "mine");
  fs::create_directory(dir / ".open.ferry");
  fs::permissions(dir / ".open.ferry", fs::perms::all);
  interrupt(dir / "littered");
  write_text(dir / ".littered.ferry/output/letter", "mine");
  interrupt(dir / "above");
  write_text(dir / ".above.ferry/letter", "mine");
  const auto before = list(dir.path());
  const std::vector<std::pair<std::string, std::string>> cases{{"link", "symbolic link"},
                                                               {"foreign", "not made by ferry"},
                                                               {"open", "written by other users"},
                                                               {"littered", "output/letter"},
                                                               {"above", ".above.ferry/letter"}};
  for (const auto& [name, why] : cases) {
    for (const bool resume : {false, true}) {
      EXPECT_TRUE(fails(ErrorKind::kUsage, {"." + name + ".ferry", why},
                        [&] { WorkFolder(dir / name, resume); }));
    }
    EXPECT_EQ(list(dir.path()), before) << name;
  }
}

TEST(WorkFolder, PublishesWhatItWroteThoughItsNameLeadsElsewhere) {
  const TempDir dir;
  {
    WorkFolder work(dir / "out", false);
    work.expect(kFiles);
    fs::rename(dir / ".out.ferry", dir / "away");
    make_checkpoint(dir / ".out.ferry/output", "another's");
    make_checkpoint(work.output(), "ours");
    work.publish({});
  }
  EXPECT_EQ(weights(dir / "out"), "ours");
  EXPECT_EQ(weights(dir / ".out.ferry/output"), "another's");
}

TEST(WorkFolder, PublishesNoFileThatItWasNotToldOf) {
  const TempDir dir;
  WorkFolder work(dir / "out", false);
  work.expect(kFiles);
  make_checkpoint(work.output(), "new");
  write_text(work.output() / "letter", "another's");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {".out.ferry/output/letter"}, [&] { work.publish({}); }));
  EXPECT_FALSE(fs::exists(dir / "out"));
}

TEST(WorkFolder, KeepsATargetThatMayNotBeReplaced) {
  const TempDir dir;
  make_checkpoint(dir / "out", "old");
  // The second time: something came into it between the look and the exchange.
  for (const int allowed : {0, 1}) {
    WorkFolder work(dir / "out", false);
    work.expect(kFiles);
    make_checkpoint(work.output(), "new");
    int looks = 0;
    const auto look = [&](const fs::path&) {
      require(looks++ < allowed, ErrorKind::kUsage, "there is a letter in it");
      return kFiles;
    };
    EXPECT_TRUE(fails(ErrorKind::kUsage, {"letter"}, [&] { work.publish(look); }));
    EXPECT_EQ(weights(dir / "out"), "old");
    EXPECT_EQ(weights(work.output()), "new");
  }
}

TEST(WorkFolder, GivesPermissionsThatAreAskedFor) {
  const TempDir dir;
  {
    WorkFolder work(dir / "a/out", false);
    work.expect(kFiles);
    make_checkpoint(work.output(), "new");
    work.publish({}, {.file = 0440, .folder = 0550});
  }
  using fs::perms;
  EXPECT_EQ(fs::status(dir / "a/out/inner/weights").permissions(),
            perms::owner_read | perms::group_read);
  for (const char* folder : {"a", "a/out", "a/out/inner"}) {
    EXPECT_EQ(fs::status(dir / folder).permissions(),
              perms::owner_all | perms::group_read | perms::group_exec)
        << folder;
  }
}

TEST(WorkFolder, ReplacesAFileBesideTheTarget) {
  const TempDir dir;
  write_text(dir / "letter", "mine");
  fs::create_symlink("letter", dir / "link");
  {
    const WorkFolder work(dir / "out", false);
    work.replace_beside("tracker", "10", 0600);
    EXPECT_EQ(identity_of(dir / "tracker").mode, 0600U);
    fs::permissions(dir / "tracker", fs::perms(0640));
    work.replace_beside("tracker", "20", 0600);
    work.replace_beside("link", "30", 0600);
  }
  EXPECT_EQ(read_text(dir / "tracker"), "20");
  EXPECT_EQ(identity_of(dir / "tracker").mode, 0640U);
  EXPECT_EQ(read_text(dir / "link"), "30");
  EXPECT_EQ(read_text(dir / "letter"), "mine");
  EXPECT_EQ(list(dir.path()), (Names{"letter", "link", "tracker"}));
}

TEST(WorkFolder, KnowsThatItHasPublished) {
  const TempDir dir;
  EXPECT_FALSE(WorkFolder::published_earlier(dir / "out"));
  make_checkpoint(dir / "out", "whole");
  {
    WorkFolder work(dir / "out", true);
    EXPECT_FALSE(WorkFolder::published_earlier(dir / "out"));
    work.mark_published();
    work.keep();
  }
  EXPECT_TRUE(WorkFolder::published_earlier(dir / "out"));
  fs::rename(dir / "out", dir / "old");
  make_checkpoint(dir / "out", "another");
  EXPECT_FALSE(WorkFolder::published_earlier(dir / "out"));
}

TEST(WorkFolder, ResumesWhatAnInterruptedRunLeft) {
  const TempDir dir;
  {
    WorkFolder work(dir / "out", false);
    work.expect(kFiles);
    make_checkpoint(work.output(), "half");
    write_text(work.journal(), "log");
    work.keep();
  }
  EXPECT_FALSE(fs::exists(dir / "out"));
  {
    WorkFolder work(dir / "out", true);
    EXPECT_EQ(weights(work.output()), "half");
    EXPECT_EQ(read_text(work.journal()), "log");
    work.publish({});
  }
  EXPECT_EQ(list(dir.path()), (Names{"out", "out/inner", "out/inner/weights"}));
}

TEST(WorkFolder, TakesARelativeTargetOfOneName) {
  const TempDir dir;
  const WorkingDirectory inside(dir.path());
  {
    WorkFolder work("out", false);
    work.expect(kFiles);
    make_checkpoint(work.output(), "new");
    work.publish({});
  }
  EXPECT_EQ(list(dir.path()), (Names{"out", "out/inner", "out/inner/weights"}));
}

TEST(WorkFolder, LeavesNothingWhereNothingCanBeWritten) {
  const TempDir dir;
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit none{0, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &none), 0);
  const bool failed =
      fails(ErrorKind::kIo, {".out.ferry"}, [&] { WorkFolder(dir / "above/out", false); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_TRUE(failed);
  EXPECT_EQ(list(dir.path()), Names{});
}

TEST(WorkFolder, TakesATargetThatEndsInASlash) {
  const TempDir dir;
  {
    WorkFolder work(dir / "out/", false);
    EXPECT_TRUE(fs::equivalent(work.path(), dir / ".out.ferry"));
    work.expect(kFiles);
    make_checkpoint(work.output(), "new");
    work.publish({});
  }
  EXPECT_EQ(list(dir.path()), (Names{"out", "out/inner", "out/inner/weights"}));
}

TEST(WorkFolder, SaysWhereItCannotBeMade) {
  const TempDir dir;
  write_text(dir / "file", "");
  EXPECT_TRUE(fails(ErrorKind::kIo, {"file"}, [&] { WorkFolder(dir / "file/out", false); }));
  write_text(dir / ".out.ferry", "");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {".out.ferry", "is not a folder"},
                    [&] { WorkFolder(dir / "out", false); }));
}

}  // namespace work_folder_test
}  // namespace ferry::distckpt
