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
  void write(std::int64_t step) const {
    write_pending(dir_.path(), step, answers(), [](const RolloutBatch& some) { return some; });
  }
  PendingAnswers read(std::int64_t step) const {
    PendingReader reader(dir_.path(), step);
    auto all = reader.description();
    for (auto& one : all.answered) {
      one.batch = reader.next_rows();
      one.greedy = reader.next_rows();
    }
    for (auto* const batch : {&all.drawn, &all.under_way, &all.sessions})
      *batch = reader.next_rows();
    return all;
  }
  fs::path file(std::int64_t step) const {
    return dir_ / "pending" / ("iter_000000" + std::to_string(step) + ".cbor");
  }

  PpoConfig config_{};
  support::TempDir dir_{};
};

TEST_F(Pending, AreReadAsTheyWereWritten) {
  write(3);
  const auto read = this->read(3);
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
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"iter_0000003.cbor"}, [&] { read(3); }));
}

TEST_F(Pending, OfADamagedFileAreRefusedByItsName) {
  write(3);
  const auto whole = distckpt::read_text(file(3));
  const auto expect_refused = [&](const std::string& damaged, std::size_t at) {
    distckpt::write_text(file(3), damaged);
    EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"iter_0000003.cbor"}, [&] { read(3); })) << at;
  };
  for (const auto size : {std::size_t{0}, std::size_t{5}, whole.size() / 2, whole.size() - 1})
    expect_refused(whole.substr(0, size), size);
  expect_refused(whole + '\0', whole.size());
  for (std::size_t at = 0; at < whole.size(); at += at < 64 ? 1 : 17) {
    auto damaged = whole;
    damaged[at] ^= 4;
    expect_refused(damaged, at);
  }
}

// Rows come a few at a time, so that rank 0 holds no more.
TEST_F(Pending, AreGatheredSomeThousandTokensAtATime) {
  std::vector<RolloutBatch::Tokens> prompts(40, RolloutBatch::Tokens(10'000, 5));
  prompts[7].resize(150'000, 6);
  auto pending = answers();
  pending.answered[0].batch = RolloutBatch::of(prompts);
  std::vector<std::int64_t> sizes;
  write_pending(dir_.path(), 3, pending, [&](const RolloutBatch& some) {
    sizes.push_back(some.size());
    return some;
  });
  EXPECT_EQ(sizes, (std::vector<std::int64_t>{6, 1, 1, 6, 6, 6, 6, 6, 2}));
  EXPECT_EQ(read(3).answered[0].batch.to_bytes(), pending.answered[0].batch.to_bytes());
  EXPECT_FALSE(fs::exists(dir_ / "pending/iter_0000003.part"));
}

TEST_F(Pending, OfStepsThatAreNotKeptAreForgotten) {
  for (const std::int64_t step : {1, 2, 3}) write(step);
  distckpt::write_text(dir_ / "pending/notes.txt", "mine");
  distckpt::write_text(dir_ / "pending/iter_0000004.part", "of a run that was killed");
  forget_pending(dir_.path(), std::array<std::int64_t, 1>{2});
  EXPECT_FALSE(fs::exists(file(1)));
  EXPECT_TRUE(fs::exists(file(2)));
  EXPECT_FALSE(fs::exists(file(3)));
  EXPECT_FALSE(fs::exists(dir_ / "pending/iter_0000004.part"));
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
