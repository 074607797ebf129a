// A stand-in for the package wandb writes down what it is asked.
#include "trainer/run/tracking_sink.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/temp_dir.h"

namespace ferry::trainer {
namespace tracking_sink_test {

using support::fails;

constexpr const char* kStandIn = R"(import os
out = open(os.environ["STAND_IN_LOG"], "a", buffering=1)
class Run:
    id = "r1"
    def log(self, data, step):
        if step == int(os.environ.get("STAND_IN_FAILS_AT", -1)):
            raise SystemExit(3)
        print(step, data, file=out)
    def finish(self):
        print("finish", file=out)
def init(project, name, id, resume, dir, config, entity):
    print("init", project, name, id, config["a"], file=out)
    return Run()
)";

class TrackingSinkTest : public testing::Test {
 protected:
  void SetUp() override {
    run_.default_local_dir = (dir_ / "run-1").string();
    std::filesystem::create_directories(dir_ / "run-1");
    std::filesystem::create_directories(dir_ / "packages");
    distckpt::write_text(dir_ / "packages/wandb.py", kStandIn);
    distckpt::write_text(dir_ / "run-1/config.toml", "a = 7\n");
    setenv("PYTHONPATH", (dir_ / "packages").c_str(), 1);
    setenv("STAND_IN_LOG", (dir_ / "log").c_str(), 1);
  }
  void TearDown() override {
    for (const auto* name : {"PYTHONPATH", "STAND_IN_LOG", "STAND_IN_FAILS_AT", "FERRY_PYTHON"})
      unsetenv(name);
  }
  // Steps `first` to `last` as jsonl_log writes them.
  void log(int first, int last) {
    for (int step = first; step <= last; ++step)
      lines_ += R"({"step": )" + std::to_string(step) + R"(, "data": {"x": 1}})" + "\n";
    distckpt::write_text(dir_ / "run-1/metrics.jsonl", lines_);
  }
  std::string tracked() const { return distckpt::read_text(dir_ / "log"); }

  support::TempDir dir_;
  TrainerConfig run_;
  std::string lines_;
};

TEST_F(TrackingSinkTest, LogsEachStepUnderTheNamesOfProjectAndFolder) {
  TrackingSink sink("wandb", run_, 0);
  log(1, 2);
  EXPECT_EQ(sink.finish(), "");
  EXPECT_EQ(tracked(), "init ferry run-1 None 7\n1 {'x': 1}\n2 {'x': 1}\nfinish\n");
}

TEST_F(TrackingSinkTest, GoesOnInTheRunOfBefore) {
  log(1, 2);
  EXPECT_EQ(TrackingSink("wandb", run_, 0).finish(), "");
  log(3, 3);
  EXPECT_EQ(TrackingSink("wandb", run_, 2).finish(), "");
  EXPECT_TRUE(tracked().ends_with("finish\ninit ferry run-1 r1 7\n3 {'x': 1}\nfinish\n"))
      << tracked();
}

TEST_F(TrackingSinkTest, BeginsAnewWhereTheRunBeginsAnew) {
  log(1, 1);
  EXPECT_EQ(TrackingSink("wandb", run_, 0).finish(), "");
  EXPECT_EQ(TrackingSink("wandb", run_, 0).finish(), "");
  EXPECT_TRUE(tracked().ends_with("init ferry run-1 None 7\n1 {'x': 1}\nfinish\n")) << tracked();
}

TEST_F(TrackingSinkTest, SaysHowThePackageEnded) {
  setenv("STAND_IN_FAILS_AT", "2", 1);
  TrackingSink sink("wandb", run_, 0);
  log(1, 3);
  EXPECT_EQ(sink.finish(), "trainer.logger: wandb lacks a part of the metrics: exit status 3");
}

TEST_F(TrackingSinkTest, RefusesAnInterpreterWithoutThePackage) {
  distckpt::write_text(dir_ / "packages/wandb.py", "raise SystemExit(5)\n");
  EXPECT_TRUE(fails(ErrorKind::kUsage,
                    {"trainer.logger: wandb did not begin: exit status 5", "FERRY_PYTHON"},
                    [&] { TrackingSink("wandb", run_, 0); }));
}

TEST_F(TrackingSinkTest, RefusesAnInterpreterThatIsNotThere) {
  setenv("FERRY_PYTHON", (dir_ / "no_python").c_str(), 1);
  EXPECT_TRUE(fails(ErrorKind::kIo, {"no_python: cannot be started"},
                    [&] { TrackingSink("wandb", run_, 0); }));
}

}  // namespace tracking_sink_test
}  // namespace ferry::trainer
