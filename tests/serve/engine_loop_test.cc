#include "serve/engine_loop.h"

#include <gtest/gtest.h>

#include "tests/serve/fake_engine.h"
#include "tests/support/expect.h"

namespace ferry::serve {
namespace engine_loop_test {

using fake_engine::FakeEngine;
using RunningLoop = fake_engine::Running<EngineLoop>;

class EngineLoopTest : public fake_engine::AnswersTest {
 protected:
  EngineLoopTest() : running_(engine_) {
    running_.loop.on_outputs([this](const auto& outputs, const auto& now) { hear(outputs, now); });
    running_.start();
  }

  void add(const std::string& id, std::int64_t max_tokens) {
    loop().add_request(id, {1, 2}, {.max_tokens = max_tokens});
  }
  // The tokens of the whole answer.
  std::vector<std::int64_t> tokens_of(const std::string& id) { return answer_of(id).tokens[0]; }
  std::size_t num_tokens(const std::string& id) {
    const std::lock_guard lock(mutex_);
    return answers_[id].tokens[0].size();
  }
  EngineStatus status() {
    const std::lock_guard lock(mutex_);
    return status_;
  }
  void wait_for_tokens(const std::string& id, std::size_t count) {
    wait([&] { return answers_[id].tokens[0].size() >= count; });
  }
  // The error of the update, and of the return to the weights of before.
  std::string update(const std::string& checkpoint, PauseMode mode) {
    auto error = result_of([&](auto done) { loop().open_weights({checkpoint, ""}, done); });
    if (error.empty()) error = result_of([&](auto done) { loop().load_weights(mode, done); });
    return error +
           result_of([&, good = error.empty()](auto done) { loop().end_update(good, done); });
  }
  EngineLoop& loop() { return running_.loop; }

  FakeEngine engine_;
  RunningLoop running_;
};

constexpr std::int64_t kEndless = 1'000'000'000;

TEST_F(EngineLoopTest, AnswersWhileWeightsAreOpened) {
  add("a", kEndless);
  wait_for_tokens("a", 1);
  engine_.opening = true;
  std::promise<std::string> opened;
  loop().open_weights({"x", ""}, [&](const std::optional<Error>& error) {
    opened.set_value(error ? error->what() : "");
  });
  auto result = opened.get_future();
  wait_for_tokens("a", num_tokens("a") + 1000);
  add("b", 3);
  EXPECT_EQ(tokens_of("b").size(), 3U);
  EXPECT_EQ(engine_.num_begun, 1);
  EXPECT_EQ(result.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  engine_.opening = false;
  EXPECT_EQ(result.get(), "");
  EXPECT_EQ(result_of([&](auto done) { loop().load_weights(PauseMode::kKeep, done); }), "");
  EXPECT_EQ(engine_.weights, 1000);
}

TEST_F(EngineLoopTest, RequestsThatArriveMeanwhileAreAnswered) {
  add("a", 50);
  wait_for_tokens("a", 1);
  add("b", 3);
  EXPECT_EQ(tokens_of("b").size(), 3U);
  EXPECT_EQ(tokens_of("a").size(), 50U);
}

TEST_F(EngineLoopTest, AnAbortedRequestHasNoFurtherOutput) {
  add("a", kEndless);
  wait_for_tokens("a", 1);
  loop().abort("a");
  wait([&] { return status_.stats.num_running == 0; });
  EXPECT_EQ(engine_.num_aborted, 1);
}

TEST_F(EngineLoopTest, APauseByKeepStopsBetweenTokens) {
  add("a", kEndless);
  wait_for_tokens("a", 2);
  EXPECT_EQ(result_of([&](auto done) { loop().pause(PauseMode::kKeep, done); }), "");
  const int steps = engine_.num_steps;
  add("b", 2);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_EQ(engine_.num_steps, steps);
  wait([&] { return status_.num_held == 1 && status_.is_paused; });
  EXPECT_EQ(result_of([&](auto done) { loop().resume(done); }), "");
  EXPECT_EQ(tokens_of("b").size(), 2U);
  loop().abort("a");
}

TEST_F(EngineLoopTest, APauseByWaitAnswersWhatIsUnderWay) {
  add("a", 2000);
  wait_for_tokens("a", 1);
  EXPECT_EQ(result_of([&](auto done) { loop().pause(PauseMode::kWait, done); }), "");
  EXPECT_EQ(num_tokens("a"), 2000U);
}

TEST_F(EngineLoopTest, APauseByAbortEndsWhatIsUnderWay) {
  add("a", kEndless);
  wait_for_tokens("a", 1);
  EXPECT_EQ(result_of([&](auto done) { loop().pause(PauseMode::kAbort, done); }), "");
  EXPECT_EQ(answer_of("a").error, "");
}

TEST_F(EngineLoopTest, WeightsChangeBetweenAnswersOrBetweenTokens) {
  add("a", 2000);
  wait_for_tokens("a", 1);
  EXPECT_EQ(update("x", PauseMode::kWait), "");
  for (const auto token : tokens_of("a")) EXPECT_LT(token, 1000);
  add("b", kEndless);
  wait_for_tokens("b", 1);
  EXPECT_EQ(update("x", PauseMode::kKeep), "");
  wait([&] { return answers_["b"].tokens[0].back() >= 2000; });
  wait([&] { return answers_["b"].tokens[0].front() < 2000; });
  EXPECT_EQ(status().weight_version, 2);
  EXPECT_EQ(engine_.num_resets, 2);
  loop().abort("b");
}

// Nobody waits for it, and nobody is sent away: an endless answer goes on.
TEST_F(EngineLoopTest, AnUpdateThatCannotBeOpenedIsRefusedBesideAnswers) {
  add("a", kEndless);
  for (const auto mode : {PauseMode::kWait, PauseMode::kAbort, PauseMode::kKeep}) {
    EXPECT_EQ(update("absent", mode), "absent: does not exist");
    wait_for_tokens("a", num_tokens("a") + 2);
  }
  EXPECT_EQ(engine_.num_resets, 0);
  loop().abort("a");
}

TEST_F(EngineLoopTest, AnUpdateThatBreaksOffLeavesTheWeightsOfBefore) {
  EXPECT_EQ(update("x", PauseMode::kWait), "");
  EXPECT_EQ(update("damaged", PauseMode::kWait), "damaged: is cut short");
  add("a", 2);
  for (const auto token : tokens_of("a")) EXPECT_EQ(token / 1000, 1);
  EXPECT_EQ(status().weight_version, 1);
  EXPECT_EQ(engine_.num_resets, 2);
}

TEST_F(EngineLoopTest, NothingIsDrawnFromWeightsThatCameInPart) {
  engine_.old_files_changed = true;
  EXPECT_EQ(update("damaged", PauseMode::kWait), "damaged: is cut shortold: has changed");
  add("a", 2);
  wait([&] { return status_.lacks_weights && status_.num_held == 1; });
  EXPECT_EQ(engine_.num_steps, 0);
  EXPECT_EQ(update("x", PauseMode::kWait), "");
  EXPECT_GE(tokens_of("a").front(), 1000);
}

// Level 2 would take the weights that the update is about to use.
TEST_F(EngineLoopTest, CommandsWaitForWeightsThatChange) {
  const auto run = [](const auto& command) { return result_of(command); };
  EXPECT_EQ(run([&](auto done) { loop().open_weights({"x", ""}, done); }), "");
  EXPECT_EQ(run([&](auto done) { loop().load_weights(PauseMode::kWait, done); }), "");
  std::promise<std::string> asleep;
  loop().sleep(2, PauseMode::kWait,
               [&](const auto& error) { asleep.set_value(error ? error->what() : ""); });
  add("a", 2);
  wait([&] { return status_.num_held == 1; });
  EXPECT_EQ(engine_.sleeps, 0);
  EXPECT_EQ(run([&](auto done) { loop().end_update(true, done); }), "");
  EXPECT_EQ(asleep.get_future().get(), "");
  EXPECT_TRUE(status().is_sleeping && status().lacks_weights);
  EXPECT_EQ(status().weight_version, 1);
}

// Else the pause would come behind the resume that ended it.
TEST_F(EngineLoopTest, AResumeEndsAPauseThatStillWaitsForAnswers) {
  add("a", 3000);
  wait_for_tokens("a", 1);
  std::promise<void> paused;
  loop().pause(PauseMode::kWait, [&](const auto&) { paused.set_value(); });
  EXPECT_EQ(result_of([&](auto done) { loop().resume(done); }), "");
  EXPECT_EQ(num_tokens("a"), 3000U);
  paused.get_future().get();
  add("b", 2);
  EXPECT_EQ(tokens_of("b").size(), 2U);
}

TEST_F(EngineLoopTest, SleepOfLevelTwoEndsWithNewWeights) {
  EXPECT_EQ(result_of([&](auto done) { loop().sleep(2, PauseMode::kWait, done); }), "");
  add("a", 2);
  EXPECT_EQ(update("x", PauseMode::kWait), "the engine sleeps: wake it up first");
  EXPECT_EQ(result_of([&](auto done) { loop().wake_up(done); }), "");
  EXPECT_EQ(engine_.num_steps, 0);
  EXPECT_EQ(update("x", PauseMode::kWait), "");
  EXPECT_GE(tokens_of("a").front(), 1000);
}

TEST_F(EngineLoopTest, AStepThatFailsEndsItsRequestsAlone) {
  add("a", kEndless);
  wait_for_tokens("a", 1);
  engine_.fails = true;
  EXPECT_EQ(answer_of("a").error, "the device is lost");
  engine_.fails = false;
  add("b", 2);
  EXPECT_EQ(tokens_of("b").size(), 2U);
}

TEST(LostEngine, EndsItsLoopBehindItsRequests) {
  FakeEngine engine;
  engine.fails = engine.lost = true;
  EngineLoop loop(engine);
  std::vector<rollout::RequestOutput> told;
  loop.on_outputs([&](const auto& outputs, const auto&) {
    told.insert(told.end(), outputs.begin(), outputs.end());
  });
  loop.add_request("a", {1}, {});
  EXPECT_TRUE(support::fails(ErrorKind::kDevice, {"the device is lost"}, [&] { loop.run(); }));
  ASSERT_EQ(told.size(), 1U);
  EXPECT_EQ(told[0].request_id, "a");
  EXPECT_TRUE(told[0].error.has_value());
}

}  // namespace engine_loop_test
}  // namespace ferry::serve
