#include "converter/progress.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "converter/open/checkpoint.h"
#include "tests/support/expect.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace progress_test {

class Reporting : public testing::Test {
 protected:
  void SetUp() override {
    support::write_tiny_model({}, dir_ / "hf", 1);
    checkpoint_ = open(dir_ / "hf");
    plan_ = distckpt::plan_read(checkpoint_.tensors, checkpoint_.side());
    source_ = checkpoint_.source();
  }
  distckpt::ExecuteReport read(std::string_view stage, const ProgressFunction& progress) {
    const distckpt::Executor executor({.threads = 1, .on_compared = {}});
    return wait_reporting(executor.submit(plan_, *source_, nullptr), stage, progress);
  }

  support::TempDir dir_;
  Checkpoint checkpoint_;
  distckpt::CopyPlan plan_;
  std::unique_ptr<distckpt::FileSource> source_;
};

TEST_F(Reporting, ReportsTheEndOfAStageWithAllItsBytes) {
  std::vector<Progress> reports;
  const auto done = read("reading", [&](const Progress& now) {
    reports.push_back(now);
    return true;
  });
  ASSERT_FALSE(reports.empty());
  EXPECT_TRUE(reports.back().finished);
  EXPECT_EQ(reports.back().stage, "reading");
  EXPECT_EQ(reports.back().bytes_done, done.bytes);
  EXPECT_EQ(done.bytes, plan_.num_bytes());
}

TEST_F(Reporting, AStageWithoutANameIsNotReported) {
  read("", [](const Progress&) {
    ADD_FAILURE();
    return true;
  });
}

TEST_F(Reporting, AnErrorOfTheFunctionEndsTheStage) {
  EXPECT_TRUE(support::fails(ErrorKind::kCancelled, {"enough"}, [&] {
    read("reading", [](const Progress&) -> bool { fail(ErrorKind::kCancelled, "enough"); });
  }));
}

TEST_F(Reporting, ToldToStopAtTheEndItIsCancelled) {
  EXPECT_TRUE(support::fails(ErrorKind::kCancelled, {"interrupted"}, [&] {
    read("reading", [](const Progress& now) { return !now.finished; });
  }));
}

}  // namespace progress_test
}  // namespace ferry::converter
