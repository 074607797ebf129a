#include "trainer/ppo/ppo_log.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "distckpt/base/json.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/models/tiny_training.h"
#include "tests/support/temp_dir.h"

namespace ferry::trainer {
namespace ppo_log_test {

using nlohmann::json;

// Two rows of 3 and 4 tokens, 3 of them responses.
RolloutBatch two_rows() {
  auto batch = RolloutBatch::of(std::vector<RolloutBatch::Tokens>{{1, 2}, {1, 2}},
                                std::vector<RolloutBatch::Tokens>{{3}, {3, 4}});
  batch.seeds = at::tensor({5, 6}, at::kLong);
  return batch;
}

class PpoLogTest : public testing::Test {
 protected:
  PpoLogTest() { config_.trainer.run.default_local_dir = dir_.path().string(); }

  PpoLog& log(std::int64_t step = 0) {
    log_ = std::make_unique<PpoLog>(config_, world_, support::tiny_config({}), step,
                                    /*total_steps=*/9,
                                    [this](const std::string& line) { said_.push_back(line); });
    return *log_;
  }
  std::vector<json> lines(const char* name) const {
    std::vector<json> found;
    std::istringstream text(distckpt::read_text(dir_ / name));
    for (std::string line; std::getline(text, line);)
      found.push_back(distckpt::parse_json(line, name));
    return found;
  }

  support::TempDir dir_;
  PpoConfig config_;
  models::World world_{{}};
  std::vector<std::string> said_;
  std::unique_ptr<PpoLog> log_;
};

TEST_F(PpoLogTest, AStepHasItsMetricsAndWhatItCost) {
  auto& written = log();
  written.begin_step(1);
  written.metrics()["actor/pg_loss"] = 0.25;
  written.phase("gen", [] { std::this_thread::sleep_for(std::chrono::milliseconds(3)); });
  written.end_step(two_rows());
  const auto step = lines("metrics.jsonl").at(0);
  EXPECT_EQ(step.at("step"), 1);
  const auto& data = step.at("data");
  EXPECT_EQ(data.at("actor/pg_loss"), 0.25);
  EXPECT_EQ(data.at("training/global_step"), 1);
  EXPECT_EQ(data.at("perf/total_num_tokens"), 7);
  EXPECT_GE(data.at("timing_s/gen").get<double>(), 0.003);
  EXPECT_GE(data.at("timing_s/step").get<double>(), data.at("timing_s/gen").get<double>());
  // verl divides the time of an answer by its tokens.
  EXPECT_NEAR(data.at("timing_per_token_ms/gen").get<double>(),
              data.at("timing_s/gen").get<double>() * 1000 / 3, 1e-9);
  ASSERT_EQ(said_.size(), 1U);
  EXPECT_TRUE(said_[0].starts_with("step 1/9")) << said_[0];
}

TEST_F(PpoLogTest, AStepForgetsTheMetricsOfTheOneBefore) {
  auto& written = log();
  written.begin_step(1);
  written.metrics()["actor/pg_loss"] = 0.25;
  written.begin_step(2);
  EXPECT_TRUE(written.metrics().empty());
}

TEST_F(PpoLogTest, APhaseThatFailsStandsOnTheTimeline) {
  auto& written = log();
  written.begin_step(1);
  EXPECT_THROW(written.phase("gen", [] { fail(ErrorKind::kIo, "broken"); }), Error);
  written.end_step(two_rows());
  EXPECT_EQ(lines("timeline/timeline_rank0.jsonl").at(0).at("name"), "gen");
}

TEST_F(PpoLogTest, TheMemoryOfAStepIsTheMostOfItsUpdates) {
  auto& written = log();
  written.begin_step(1);
  const auto gib = std::int64_t{1} << 30;
  written.add_update("update_critic", {.max_memory = {.allocated = 3 * gib, .reserved = 4 * gib}});
  written.add_update("update_actor", {.metrics = {{"actor/lr", 0.5}},
                                      .max_memory = {.allocated = 2 * gib, .reserved = 5 * gib}});
  written.end_step(two_rows());
  const auto data = lines("metrics.jsonl").at(0).at("data");
  EXPECT_EQ(data.at("perf/max_memory_allocated_gb"), 3);
  EXPECT_EQ(data.at("perf/max_memory_reserved_gb"), 5);
  EXPECT_EQ(data.at("actor/lr"), 0.5);
}

TEST_F(PpoLogTest, SaysWhichUpdateWasSkipped) {
  auto& written = log();
  written.begin_step(4);
  written.add_update("update_actor", {.not_finite = "output_layer.weight"});
  EXPECT_EQ(said_, (std::vector<std::string>{"step 4: update_actor skipped an update: the gradient "
                                             "of output_layer.weight is not finite"}));
}

TEST_F(PpoLogTest, ASaveIsTimedBehindItsStep) {
  auto& written = log();
  written.begin_step(1);
  written.end_step(two_rows());
  written.time_save([] { std::this_thread::sleep_for(std::chrono::milliseconds(2)); });
  const auto found = lines("metrics.jsonl");
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[1].at("step"), 1);
  EXPECT_GE(found[1].at("data").at("timing_s/save_checkpoint").get<double>(), 0.002);
}

TEST_F(PpoLogTest, ARunThatGoesOnForgetsLaterSteps) {
  const auto& written = log();
  for (const auto step : {1, 2, 3}) written.write(step, {{"a", 1}});
  log(/*step=*/1).write(2, {{"a", 2}});
  EXPECT_EQ(lines("metrics.jsonl").back().at("data").at("a"), 2);
  EXPECT_EQ(lines("metrics.jsonl").size(), 2U);
}

TEST_F(PpoLogTest, JournalsSessionsOfSeveralTurnsAlone) {
  auto batch = two_rows();
  batch.agent_info = {{{"exchanges", {1}}}, {{"exchanges", json::array()}}};
  log().write_sessions(1, false, batch);
  EXPECT_FALSE(std::filesystem::exists(dir_ / "sessions"));
  config_.rollout.agents.agent.env_command = "play";
  auto& written = log();
  written.write_sessions(1, false, batch);
  written.write_sessions(0, true, batch);
  EXPECT_EQ(lines("sessions/1.jsonl").at(0), json({{"session", 5}, {"exchanges", {1}}}));
  EXPECT_EQ(lines("sessions/validation/0.jsonl").size(), 2U);
}

TEST_F(PpoLogTest, SpansOfProgramsStandBesideThoseOfTheStep) {
  auto& written = log();
  written.begin_step(1);
  written.add_spans({{.name = "tool/add", .start = 10, .end = 12}});
  written.end_step(two_rows());
  const auto span = lines("timeline/timeline_rank0.jsonl").at(0);
  EXPECT_EQ(span.at("name"), "tool/add");
  EXPECT_EQ(span.at("step"), 1);
  EXPECT_FALSE(lines("metrics.jsonl").at(0).at("data").contains("timing_s/tool/add"));
}

}  // namespace ppo_log_test
}  // namespace ferry::trainer
