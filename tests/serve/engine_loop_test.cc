#include "serve/engine_loop.h"

#include <gtest/gtest.h>

#include <future>

#include "tests/serve/fake_engine.h"

namespace ferry::serve {
namespace engine_loop_test {

using fake_engine::FakeEngine;
using fake_engine::FinishReason;
using fake_engine::RequestOutput;
using RunningLoop = fake_engine::Running<EngineLoop>;

class EngineLoopTest : public testing::Test {
 protected:
  EngineLoopTest() : running_(engine_) {
    running_.loop.on_outputs([this](std::vector<RequestOutput> outputs, const EngineStatus& now) {
      const std::lock_guard lock(mutex_);
      for (auto& output : outputs) {
        auto& answer = answers_[output.request_id];
        for (const auto& sample : output.outputs)
          for (const auto& token : sample.tokens) answer.tokens.push_back(token.token_id);
        answer.finished = answer.finished || output.finished;
        if (output.error) answer.error = output.error->what();
      }
      status_ = now;
      changed_.notify_all();
    });
    running_.start();
  }

  struct Answer {
    std::vector<std::int64_t> tokens{};
    bool finished = false;
    std::string error{};
  };

  void add(const std::string& id, std::int64_t max_tokens) {
    loop().add_request(id, {1, 2}, {.max_tokens = max_tokens});
  }
  void wait(const std::function<bool()>& condition) {
    std::unique_lock lock(mutex_);
    ASSERT_TRUE(changed_.wait_for(lock, std::chrono::seconds(20), condition));
  }
  Answer answer_of(const std::string& id) {
    wait([&] { return answers_[id].finished; });
    const std::lock_guard lock(mutex_);
    return answers_[id];
  }
  std::size_t num_tokens(const std::string& id) {
    const std::lock_guard lock(mutex_);
    return answers_[id].tokens.size();
  }
  EngineStatus status() {
    const std::lock_guard lock(mutex_);
    return status_;
  }
  void wait_for_tokens(const std::string& id, std::size_t count) {
    wait([&] { return answers_[id].tokens.size() >= count; });
  }
  // The message of the error that a command meets; empty: none.
  std::string result_of(const std::function<void(EngineLoop::Done)>& command) {
    std::promise<std::string> result;
    command(
        [&](const std::optional<Error>& error) { result.set_value(error ? error->what() : ""); });
    return result.get_future().get();
  }
  std::string update(const std::string& checkpoint, PauseMode mode) {
    return result_of([&](auto done) { loop().update_weights({checkpoint, ""}, mode, done); });
  }
  EngineLoop& loop() { return running_.loop; }

  FakeEngine engine_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, Answer> answers_;
  EngineStatus status_{};
  RunningLoop running_;
};

constexpr std::int64_t kEndless = 1'000'000'000;

TEST_F(EngineLoopTest, RequestsThatArriveMeanwhileAreAnswered) {
  add("a", 50);
  wait_for_tokens("a", 1);
  add("b", 3);
  EXPECT_EQ(answer_of("b").tokens.size(), 3U);
  EXPECT_EQ(answer_of("a").tokens.size(), 50U);
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
  EXPECT_EQ(answer_of("b").tokens.size(), 2U);
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
  for (const auto token : answer_of("a").tokens) EXPECT_LT(token, 1000);
  add("b", kEndless);
  wait_for_tokens("b", 1);
  EXPECT_EQ(update("x", PauseMode::kKeep), "");
  wait([&] { return answers_["b"].tokens.back() >= 2000; });
  wait([&] { return answers_["b"].tokens.front() < 2000; });
  EXPECT_EQ(status().weight_version, 2);
  EXPECT_EQ(engine_.num_resets, 2);
  loop().abort("b");
}

TEST_F(EngineLoopTest, AnUpdateThatCannotBeOpenedChangesNothing) {
  EXPECT_EQ(update("absent", PauseMode::kWait), "absent: does not exist");
  add("a", 2);
  EXPECT_EQ(answer_of("a").tokens.size(), 2U);
}

TEST_F(EngineLoopTest, NothingIsDrawnFromWeightsThatCameInPart) {
  EXPECT_EQ(update("damaged", PauseMode::kWait), "damaged: is cut short");
  add("a", 2);
  wait([&] { return status_.lacks_weights && status_.num_held == 1; });
  EXPECT_EQ(engine_.num_steps, 0);
  EXPECT_EQ(update("x", PauseMode::kWait), "");
  EXPECT_GE(answer_of("a").tokens.front(), 1000);
}

TEST_F(EngineLoopTest, SleepOfLevelTwoEndsWithNewWeights) {
  EXPECT_EQ(result_of([&](auto done) { loop().sleep(2, PauseMode::kWait, done); }), "");
  add("a", 2);
  EXPECT_EQ(update("x", PauseMode::kWait), "the engine sleeps: wake it up first");
  EXPECT_EQ(result_of([&](auto done) { loop().wake_up(done); }), "");
  EXPECT_EQ(engine_.num_steps, 0);
  EXPECT_EQ(update("x", PauseMode::kWait), "");
  EXPECT_GE(answer_of("a").tokens.front(), 1000);
}

TEST_F(EngineLoopTest, AStepThatFailsEndsItsRequestsAlone) {
  add("a", kEndless);
  wait_for_tokens("a", 1);
  engine_.fails = true;
  EXPECT_EQ(answer_of("a").error, "the device is lost");
  engine_.fails = false;
  add("b", 2);
  EXPECT_EQ(answer_of("b").tokens.size(), 2U);
}

}  // namespace engine_loop_test
}  // namespace ferry::serve
