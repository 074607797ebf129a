#include "trainer/run/run_start.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tests/support/expect.h"
#include "tests/support/temp_dir.h"

namespace ferry::trainer {
namespace run_start_test {

namespace fs = std::filesystem;
using support::fails;

const RoleFolders kOne{""}, kTwo{"actor", "critic"};

class RunStartTest : public testing::Test {
 protected:
  // A run whose checkpoints are of these folders: "iter_0000010", "actor/iter_0000010".
  fs::path run(const std::string& name, const std::vector<std::string>& folders) const {
    for (const auto& folder : folders) fs::create_directories(dir_ / name / folder);
    return dir_ / name;
  }
  fs::path own(const std::vector<std::string>& folders = {}) const { return run("own", folders); }

  static CheckpointSection from(const fs::path& path) {
    return {.resume_mode = ResumeMode::kResumePath, .resume_from_path = path.string()};
  }

  support::TempDir dir_;
};

TEST_F(RunStartTest, IsTheModelWhereNothingWasSaved) {
  EXPECT_EQ(run_start({}, own(), kOne).step, 0);
}

TEST_F(RunStartTest, IsTheNewestStepOfTheRun) {
  const auto folder = own({"iter_0000010", "iter_0000200", "iter_0000030", "logs"});
  const auto start = run_start({}, folder, kOne);
  EXPECT_EQ(start.step, 200);
  EXPECT_EQ(start.root, "");
}

TEST_F(RunStartTest, IsTheNewestStepThatAllRolesHave) {
  const auto folder = own({"actor/iter_0000010", "actor/iter_0000020", "critic/iter_0000010"});
  EXPECT_EQ(run_start({}, folder, kTwo).step, 10);
}

// It died in its first save, of which one role was complete.
TEST_F(RunStartTest, IsTheModelWhereARoleHasNothing) {
  EXPECT_EQ(run_start({}, own({"critic/iter_0000010"}), kTwo).step, 0);
  EXPECT_EQ(run_start({}, run("other", {"actor/iter_0000010", "critic"}), kTwo).step, 0);
}

TEST_F(RunStartTest, RefusesWhatARunWithoutTheRoleHasSaved) {
  const auto folder = own({"actor/iter_0000010"});
  for (const auto& checkpoint : {CheckpointSection{}, from(folder)})
    EXPECT_TRUE(fails(ErrorKind::kUsage,
                      {folder.string() + ": has checkpoints of actor, and none of critic",
                       "another trainer.default_local_dir, with " + (folder / "actor").string()},
                      [&] { run_start(checkpoint, folder, kTwo); }));
}

TEST_F(RunStartTest, NeedsOnlyTheRolesThatTheRunHas) {
  const auto other = run("other", {"actor/iter_0000010", "critic/iter_0000010"});
  EXPECT_EQ(run_start(from(other), own(), {"actor"}).step, 10);
}

TEST_F(RunStartTest, WithoutResumingRefusesAFolderThatHasCheckpoints) {
  const auto folder = own({"iter_0000010"});
  EXPECT_TRUE(fails(ErrorKind::kUsage,
                    {"checkpoint of step 10", "would begin behind step 0", "resume_mode=auto"},
                    [&] { run_start({.resume_mode = ResumeMode::kDisable}, folder, kOne); }));
}

TEST_F(RunStartTest, WithoutResumingBeginsInANewFolder) {
  EXPECT_EQ(run_start({.resume_mode = ResumeMode::kDisable}, own(), kOne).step, 0);
}

TEST_F(RunStartTest, IsTheNewestStepOfAnotherRun) {
  const auto other = run("other", {"iter_0000010", "iter_0000020"});
  for (const auto& path : {other, other / ""}) {
    const auto start = run_start(from(path), own(), kOne);
    EXPECT_EQ(start.step, 20) << path;
    EXPECT_EQ(start.root, other) << path;
  }
}

TEST_F(RunStartTest, IsTheStepOfAnotherRunThatIsNamed) {
  const auto other = run("other", {"iter_0000010", "iter_0000020"});
  const auto start = run_start(from(other / "iter_0000010"), own(), kOne);
  EXPECT_EQ(start.step, 10);
  EXPECT_EQ(start.root, other);
}

TEST_F(RunStartTest, IsTheStepThatIsNamedByTheFolderOfARole) {
  const auto other = run("other", {"actor/iter_0000010", "critic/iter_0000010",
                                   "actor/iter_0000020", "critic/iter_0000020"});
  const auto start = run_start(from(other / "actor/iter_0000010"), own(), kTwo);
  EXPECT_EQ(start.step, 10);
  EXPECT_EQ(start.root, other);
}

TEST_F(RunStartTest, RefusesAnotherRunWithoutCheckpoints) {
  const auto other = run("other", {"actor/iter_0000010", "critic/iter_0000020"});
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"no checkpoint of actor and critic to go on from"},
                    [&] { run_start(from(other), own(), kTwo); }));
}

TEST_F(RunStartTest, RefusesAStepThatAnotherRunLacks) {
  const auto other = run("other", {"iter_0000010", "iter_0000020"});
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"no checkpoint behind step 30, only behind 10, 20"},
                    [&] { run_start(from(other / "iter_0000030"), own(), kOne); }));
}

TEST_F(RunStartTest, RefusesToWriteOverNewerStepsOfItsOwn) {
  const auto other = run("other", {"iter_0000010"});
  const auto folder = own({"iter_0000020"});
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"checkpoint of step 20", "would begin behind step 10"},
                    [&] { run_start(from(other), folder, kOne); }));
}

}  // namespace run_start_test
}  // namespace ferry::trainer
