#include "trainer/agents/session_journal.h"

#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/temp_dir.h"

namespace ferry::trainer {
namespace session_journal_test {

using nlohmann::json;
using support::fails;

// Sessions that have asked their own seed.
RolloutBatch batch(const std::vector<std::int64_t>& seeds) {
  RolloutBatch made =
      RolloutBatch::of(std::vector<RolloutBatch::Tokens>(seeds.size(), RolloutBatch::Tokens{1}));
  made.seeds = at::tensor(seeds, at::kLong);
  for (const auto seed : seeds)
    made.agent_info.push_back(
        {{"exchanges", json::array({{{"question", {{"n", seed}}}, {"answer", "\xff"}}})}});
  return made;
}

TEST(SessionJournal, HasALineForEachSession) {
  const support::TempDir dir;
  const SessionJournal journal(dir.path(), 0);
  journal.write(3, false, batch({5}));
  journal.write(3, false, batch({-6}));  // another batch of the step
  journal.write(3, true, batch({7}));
  EXPECT_EQ(distckpt::read_text(dir / "3.jsonl"),
            "{\"session\":5,\"exchanges\":[{\"answer\":\"\uFFFD\",\"question\":{\"n\":5}}]}\n"
            "{\"session\":-6,\"exchanges\":[{\"answer\":\"\uFFFD\",\"question\":{\"n\":-6}}]}\n");
  EXPECT_NE(distckpt::read_text(dir / "validation/3.jsonl").find("\"session\":7"),
            std::string::npos);
}

TEST(SessionJournal, HasTheStepsOfPartialRollouts) {
  const support::TempDir dir;
  const SessionJournal journal(dir.path(), 0);
  auto one = batch({5});
  one.agent_info[0]["global_steps"] = runs_of_steps(std::vector<std::int64_t>{4, 4, 5, 4});
  journal.write(7, false, one);
  const auto line = json::parse(distckpt::read_text(dir / "7.jsonl"));
  EXPECT_EQ(line.at("step"), 7);
  EXPECT_EQ(line.at("global_steps"), json::parse("[[4, 2], [5, 1], [4, 1]]"));
}

TEST(SessionJournal, ForgetsWhatARunDoesAgain) {
  const support::TempDir dir;
  const SessionJournal first(dir.path(), 0);
  for (const std::int64_t step : {0, 4, 5, 11}) {
    first.write(step, false, batch({step}));
    first.write(step, true, batch({step}));
  }
  const SessionJournal second(dir.path(), 5);
  for (const auto* folder : {"", "validation/"}) {
    EXPECT_TRUE(std::filesystem::exists(dir.path() / folder / "4.jsonl"));
    EXPECT_FALSE(std::filesystem::exists(dir.path() / folder / "5.jsonl"));
    EXPECT_FALSE(std::filesystem::exists(dir.path() / folder / "11.jsonl"));
  }
}

TEST(SessionJournal, GivesSessionsTheirAnswersAgain) {
  const support::TempDir dir;
  SessionJournal(dir.path(), 0).write(3, false, batch({5, 6}));
  auto again = batch({6, 5});
  add_replay(again, dir.path(), 3, 3, false);
  EXPECT_EQ(again.replay.at(0).at("exchanges").at(0).at("question"), json({{"n", 6}}));
  EXPECT_EQ(again.replay.at(1).at("session"), 5);
}

TEST(SessionJournal, KnowsARunThatIsAnother) {
  const support::TempDir dir;
  SessionJournal(dir.path(), 0).write(3, false, batch({5}));
  auto other = batch({8});
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"3.jsonl", "has no session 8", "another one"},
                    [&] { add_replay(other, dir.path(), 3, 3, false); }));
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"4.jsonl"},
                    [&] { add_replay(other, dir.path(), 4, 4, false); }));
}

TEST(SessionJournal, SeeksAPartialSessionInSeveralSteps) {
  const support::TempDir dir;
  const SessionJournal journal(dir.path(), 0);
  journal.write(2, false, batch({5}));
  journal.write(4, false, batch({6}));
  auto again = batch({5, 6, 7});
  add_replay(again, dir.path(), 2, 5, false);
  EXPECT_EQ(again.replay.at(0).at("session"), 5);
  EXPECT_EQ(again.replay.at(1).at("session"), 6);
  EXPECT_FALSE(again.replay.at(2).contains("session")) << "the run ended before it did";
}

TEST(SessionJournal, NamesALineThatIsDamaged) {
  const support::TempDir dir;
  auto one = batch({5});
  for (const auto* line :
       {"{\"session\": 5, \"exch", "{\"exchanges\": []}", "{\"session\": \"x\"}"}) {
    distckpt::write_text(dir / "3.jsonl", std::string(line) + "\n");
    EXPECT_TRUE(
        fails(ErrorKind::kCorrupt, {"3.jsonl"}, [&] { add_replay(one, dir.path(), 3, 3, false); }));
  }
}

}  // namespace session_journal_test
}  // namespace ferry::trainer
