#include "trainer/ppo/pending_answers.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <string>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/models/rollout_rows.h"
#include "tests/support/temp_dir.h"

namespace ferry::trainer {
namespace pending_answers_test {

namespace fs = std::filesystem;
using support::fails;

RolloutBatch rows(std::int64_t first) {
  auto batch = support::rollout_rows({at::tensor({first, first + 1, first + 2}, at::kLong),
                                      at::tensor({first, first + 3}, at::kLong)},
                                     {1, 1});
  batch.rollout_log_probs = support::of_rows(batch, {-0.5, -0.25});
  return batch;
}

class Pending : public testing::Test {
 protected:
  PendingAnswers answers() const {
    PendingAnswers some{.settings = settings_of_answers(config_),
                        .data = R"({"row":7})",
                        .data_before = {{4, R"({"row":5})"}},
                        .last_asked = 5,
                        .last_drawn = 6,
                        .num_started = 24,
                        .epoch = 1};
    some.answered.push_back({.step = 4, .epoch = 1, .batch = rows(10), .greedy = {}});
    some.under_way = rows(20);
    return some;
  }
  fs::path file(std::int64_t step) const {
    return dir_ / "pending" / ("iter_000000" + std::to_string(step) + ".cbor");
  }

  PpoConfig config_{};
  support::TempDir dir_{};
};

TEST_F(Pending, AreReadAsTheyWereWritten) {
  write_pending(dir_.path(), 3, answers());
  const auto read = read_pending(dir_.path(), 3);
  EXPECT_EQ(read.settings, settings_of_answers(config_));
  EXPECT_EQ(read.data, R"({"row":7})");
  EXPECT_EQ(read.data_before, answers().data_before);
  EXPECT_EQ(read.last_asked, 5);
  EXPECT_EQ(read.last_drawn, 6);
  EXPECT_EQ(read.num_started, 24);
  EXPECT_EQ(read.epoch, 1);
  EXPECT_EQ(read.num_rows(), 4);
  ASSERT_EQ(read.answered.size(), 1U);
  EXPECT_EQ(read.answered[0].step, 4);
  EXPECT_EQ(read.answered[0].batch.to_bytes(), rows(10).to_bytes());
  EXPECT_EQ(read.under_way.to_bytes(), rows(20).to_bytes());
  EXPECT_EQ(read.drawn.size(), 0);
}

TEST_F(Pending, AreNotThereWithoutAFile) {
  EXPECT_TRUE(
      fails(ErrorKind::kNotFound, {"iter_0000003.cbor"}, [&] { read_pending(dir_.path(), 3); }));
}

TEST_F(Pending, OfADamagedFileAreRefusedByItsName) {
  write_pending(dir_.path(), 3, answers());
  const auto whole = distckpt::read_text(file(3));
  for (const auto size : {std::size_t{0}, whole.size() / 2, whole.size() - 1}) {
    distckpt::write_text(file(3), whole.substr(0, size));
    EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"iter_0000003.cbor"}, [&] {
      read_pending(dir_.path(), 3);
    })) << size;
  }
}

TEST_F(Pending, OfStepsThatAreNotKeptAreForgotten) {
  for (const std::int64_t step : {1, 2, 3}) write_pending(dir_.path(), step, answers());
  distckpt::write_text(dir_ / "pending/notes.txt", "mine");
  forget_pending(dir_.path(), std::array<std::int64_t, 1>{2});
  EXPECT_FALSE(fs::exists(file(1)));
  EXPECT_TRUE(fs::exists(file(2)));
  EXPECT_FALSE(fs::exists(file(3)));
  EXPECT_TRUE(fs::exists(dir_ / "pending/notes.txt"));
  forget_pending(dir_ / "none", {});
}

// Columns that a run lacks or has: those of a program that scores whole conversations, and those of
// sessions that are replayed.
TEST_F(Pending, AreThoseOfOtherSettingsWhereColumnsDiffer) {
  const auto before = settings_of_answers(config_);
  auto replays = config_;
  replays.rollout.agents.agent.replay_dir = "sessions";
  EXPECT_NE(settings_of_answers(replays), before);
  auto scores = config_;
  scores.reward.command = "python3 reward.py";
  scores.reward.num_workers = 1;
  EXPECT_EQ(settings_of_answers(scores), before);
  for (auto* const config : {&config_, &scores})
    config->rollout.agents.agent.env_command = "python3 env.py";
  ASSERT_TRUE(config_.rollout.agents.enabled());
  EXPECT_NE(settings_of_answers(scores), settings_of_answers(config_));
  scores.rollout.n = config_.rollout.n + 1;
  EXPECT_NE(settings_of_answers(scores).at("n"), settings_of_answers(config_).at("n"));
}

}  // namespace pending_answers_test
}  // namespace ferry::trainer
