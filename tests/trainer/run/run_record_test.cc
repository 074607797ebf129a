#include "trainer/run/run_record.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "distckpt/base/json.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/temp_dir.h"
#include "trainer/engine/run_options.h"
#include "trainer/metrics/run_log.h"

namespace ferry::trainer {
namespace run_record_test {

namespace fs = std::filesystem;

class RunRecordTest : public testing::Test {
 protected:
  void SetUp() override { run_.default_local_dir = dir_.path().string(); }

  // Logs `steps` of a run that begins behind `begun`.
  void log(std::int64_t begun, const std::vector<std::int64_t>& steps, int rank = 0) {
    RunRecord record(run_, rank, begun, 10, "# its configuration\n",
                     [&](const std::string& line) { said_.push_back(line); });
    for (const auto step : steps) {
      const Metrics metrics{{"train/loss", 0.5 * static_cast<double>(step)}};
      record.write(step, metrics);
      record.show(step, metrics);
    }
    record.finish();
  }
  std::vector<std::int64_t> logged() const {
    std::vector<std::int64_t> steps;
    const auto text = distckpt::read_text(dir_ / kMetricsFile);
    for (std::size_t at = 0; at < text.size();) {
      const auto end = text.find('\n', at);
      const auto line = distckpt::parse_json(text.substr(at, end - at), "line");
      EXPECT_EQ(line.at("data").at("train/loss"), 0.5 * line.at("step").get<double>());
      steps.push_back(line.at("step"));
      at = end + 1;
    }
    return steps;
  }

  support::TempDir dir_;
  TrainerConfig run_;
  std::vector<std::string> said_;
};

TEST_F(RunRecordTest, KeepsTheConfigurationAndEachStep) {
  log(0, {1, 2, 3});
  EXPECT_EQ(distckpt::read_text(dir_ / kConfigFile), "# its configuration\n");
  EXPECT_EQ(logged(), (std::vector<std::int64_t>{1, 2, 3}));
}

TEST_F(RunRecordTest, SaysALineForEachStep) {
  log(0, {1, 2});
  ASSERT_EQ(said_.size(), 2U);
  EXPECT_TRUE(said_[0].starts_with("step 1/10  loss 0.5000")) << said_[0];
  EXPECT_TRUE(said_[1].starts_with("step 2/10  loss 1.0000")) << said_[1];
}

TEST_F(RunRecordTest, ForgetsStepsBehindTheOneThatTheRunGoesOnFrom) {
  log(0, {1, 2, 3, 4});
  log(2, {3});
  EXPECT_EQ(logged(), (std::vector<std::int64_t>{1, 2, 3}));
}

TEST_F(RunRecordTest, HasOnlyTheDestinationsThatAreAsked) {
  run_.logger = {Logger::kFile};
  log(0, {1});
  EXPECT_EQ(said_, std::vector<std::string>{});
  EXPECT_EQ(logged(), std::vector<std::int64_t>{1});
}

TEST_F(RunRecordTest, KeepsNoMetricsWhereOnlyTheConsoleIsAsked) {
  run_.logger = {Logger::kConsole};
  log(0, {1});
  EXPECT_EQ(said_.size(), 1U);
  EXPECT_FALSE(fs::exists(dir_ / kMetricsFile));
}

TEST_F(RunRecordTest, OtherRanksKeepTheirSpansAlone) {
  log(0, {1}, 1);
  EXPECT_EQ(said_, std::vector<std::string>{});
  EXPECT_FALSE(fs::exists(dir_ / kMetricsFile));
  EXPECT_FALSE(fs::exists(dir_ / kConfigFile));
}

}  // namespace run_record_test
}  // namespace ferry::trainer
