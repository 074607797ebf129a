#include "serve/engine_fleet.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "tests/serve/fake_engine.h"

namespace ferry::serve {
namespace engine_fleet_test {

using fake_engine::FakeEngine;
using fake_engine::token_of;

class EngineFleetTest : public fake_engine::AnswersTest {
 public:
  EngineFleetTest() : fleet_({&engines_[0], &engines_[1], &engines_[2]}) {
    fleet_.on_outputs(
        [this](std::size_t, const auto& outputs, const auto& now) { hear(outputs, now); });
    thread_ = std::thread([this] {
      try {
        fleet_.run();
      } catch (const Error& error) {
        end_.set_value(error.what());
      }
    });
  }
  ~EngineFleetTest() override {
    fleet_.stop();
    thread_.join();
  }

  static std::vector<std::int64_t> expected(const std::vector<std::int64_t>& prompt,
                                            std::int64_t index,
                                            std::int64_t count) {
    std::vector<std::int64_t> tokens;
    for (std::int64_t i = 1; i <= count; ++i) tokens.push_back(token_of(prompt, 0, index, i));
    return tokens;
  }

  std::array<FakeEngine, 3> engines_;
  EngineFleet fleet_;
  std::promise<std::string> end_;  // the error of run()
  std::thread thread_;
};

TEST_F(EngineFleetTest, SpreadsRequestsOverItsEngines) {
  for (int i = 0; i < 6; ++i)
    fleet_.add_request(std::to_string(i), {i, 1, 2}, {.max_tokens = 20'000});
  for (int i = 0; i < 6; ++i)
    EXPECT_EQ(answer_of(std::to_string(i)).tokens[0], expected({i, 1, 2}, 0, 20'000));
  for (const auto& engine : engines_) EXPECT_GE(engine.num_steps, 20'000);
}

TEST_F(EngineFleetTest, SendsAPromptWhereItsBeginningIs) {
  std::vector<std::int64_t> prompt(320, 7);
  fleet_.add_request("0", prompt, {.max_tokens = 1});
  fleet_.add_request("other", std::vector<std::int64_t>(320, 3), {.max_tokens = 1});
  answer_of("0");
  answer_of("other");
  const int before[] = {engines_[0].num_steps, engines_[1].num_steps, engines_[2].num_steps};
  prompt.push_back(8);
  fleet_.add_request("1", prompt, {.max_tokens = 1});
  answer_of("1");
  EXPECT_EQ(engines_[0].num_steps, before[0] + 1);
  EXPECT_EQ(engines_[1].num_steps, before[1]);
  EXPECT_EQ(engines_[2].num_steps, before[2]);
}

TEST_F(EngineFleetTest, GoesOnElsewhereIfAnEngineFails) {
  for (int i = 0; i < 3; ++i)
    fleet_.add_request(std::to_string(i), {i}, {.n = 2, .max_tokens = 20'000});
  wait([&] {
    return std::ranges::all_of(std::array{"0", "1", "2"},
                               [&](const char* id) { return answers_[id].tokens[0].size() > 10; });
  });
  engines_[0].fails = true;
  engines_[2].fails = true;
  for (int i = 0; i < 3; ++i) {
    const auto answer = answer_of(std::to_string(i));
    EXPECT_EQ(answer.error, "");
    for (std::int64_t sample = 0; sample < 2; ++sample)
      EXPECT_EQ(answer.tokens.at(sample), expected({i}, sample, 20'000));
  }
  fleet_.add_request("later", {5}, {.max_tokens = 3});
  EXPECT_EQ(answer_of("later").tokens[0], expected({5}, 0, 3));
}

// Tokens of the weights before an update cannot be drawn again behind it.
TEST_F(EngineFleetTest, EndsWhatAnEngineThatFailsDrewByWeightsThatAreGone) {
  fleet_.add_request("mixed", {1}, {.max_tokens = 1'000'000'000});
  wait([&] { return answers_["mixed"].tokens[0].size() > 10; });
  EXPECT_EQ(result_of([&](auto done) {
              fleet_.update_weights({"new", ""}, PauseMode::kKeep, done);
            }),
            "");
  wait([&] { return answers_["mixed"].tokens[0].back() >= 1000; });
  EXPECT_EQ(answers_["mixed"].tokens[0][0], expected({1}, 0, 1)[0]);
  const auto engine = engines_[0].num_steps > 0 ? 0U : engines_[1].num_steps > 0 ? 1U : 2U;
  engines_[engine].fails = true;
  EXPECT_EQ(answer_of("mixed").error,
            "the engine of this request failed, and the weights that drew its first tokens are "
            "gone");
  fleet_.add_request("later", {5}, {.max_tokens = 3});
  EXPECT_EQ(answer_of("later").tokens[0][2], expected({5}, 0, 3)[2] + 1000);
}

TEST_F(EngineFleetTest, LeavesOutAnEngineThatFailsWhileItHasNothingToDo) {
  engines_[1].fails = true;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (engines_[1].num_idle == 0 && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  for (int i = 0; i < 4; ++i) fleet_.add_request(std::to_string(i), {i}, {.max_tokens = 50});
  for (int i = 0; i < 4; ++i)
    EXPECT_EQ(answer_of(std::to_string(i)).tokens[0], expected({i}, 0, 50));
  EXPECT_EQ(engines_[1].num_steps, 0);
}

TEST_F(EngineFleetTest, EndsIfAllEnginesFailWhileTheyHaveNothingToDo) {
  for (auto& engine : engines_) engine.fails = true;
  auto end = end_.get_future();
  ASSERT_EQ(end.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  EXPECT_EQ(end.get(), "the device is lost");
}

TEST_F(EngineFleetTest, ReportsTheErrorOfItsLastEngine) {
  for (auto& engine : engines_) engine.fails = true;
  fleet_.add_request("0", {1}, {.max_tokens = 3});
  EXPECT_EQ(answer_of("0").error, "the device is lost");
}

TEST_F(EngineFleetTest, UpdatesAllEngines) {
  EXPECT_EQ(result_of([&](auto done) {
              fleet_.update_weights({"new", ""}, PauseMode::kWait, done);
            }),
            "");
  for (const auto& engine : engines_) EXPECT_EQ(engine.weights, 1000);
  wait([&] { return status_.weight_version == 1; });
  EXPECT_EQ(result_of([&](auto done) {
              fleet_.update_weights({"absent", ""}, PauseMode::kKeep, done);
            }),
            "absent: does not exist; the weights are those of before");
  fleet_.add_request("0", {1}, {.max_tokens = 1});
  EXPECT_EQ(answer_of("0").tokens[0][0], expected({1}, 0, 1)[0] + 1000);
}

// One that is refused by one engine, and one that only one engine fails to load.
TEST_F(EngineFleetTest, UpdatesAllEnginesOrNone) {
  const auto update = [&](const char* checkpoint, EngineFleet::Done done) {
    fleet_.update_weights({checkpoint, ""}, PauseMode::kWait, std::move(done));
  };
  engines_[1].refused = "theirs";
  EXPECT_EQ(result_of([&](auto done) { update("theirs", done); }),
            "theirs: is another model; the weights are those of before");
  for (const auto& engine : engines_) EXPECT_EQ(engine.num_resets, 0);
  engines_[2].fails_to_load = true;
  EXPECT_EQ(result_of([&](auto done) { update("new", done); }),
            "new: is cut short; the weights are those of before");
  for (const auto& engine : engines_) EXPECT_EQ(engine.weights, 0);
  fleet_.add_request("0", {1}, {.max_tokens = 2});
  EXPECT_EQ(answer_of("0").tokens[0], expected({1}, 0, 2));
  EXPECT_EQ(status_.weight_version, 0);
}

TEST_F(EngineFleetTest, SaysWhereNoWeightsAreLeft) {
  engines_[1].fails_to_load = true;
  engines_[0].old_files_changed = true;
  const auto update = [&](auto done) {
    fleet_.update_weights({"new", ""}, PauseMode::kWait, std::move(done));
  };
  EXPECT_EQ(result_of(update),
            "new: is cut short; nor could the weights of before be loaded: old: has changed; "
            "requests wait for an update that succeeds");
  engines_[1].fails_to_load = false;
  fleet_.add_request("0", {1}, {.max_tokens = 1});
  EXPECT_EQ(result_of(update), "");
  EXPECT_GE(answer_of("0").tokens[0][0], 1000);
}

TEST_F(EngineFleetTest, UpdatesComeOneBehindAnother) {
  fleet_.add_request("0", {1}, {.max_tokens = 5000});
  wait([&] { return !answers_["0"].tokens[0].empty(); });
  std::array<std::promise<std::string>, 3> ends;
  const std::array<const char*, 3> checkpoints{"new", "absent", "newer"};
  for (std::size_t i = 0; i < ends.size(); ++i)
    fleet_.update_weights({checkpoints[i], ""}, PauseMode::kWait, [&, i](const auto& error) {
      ends[i].set_value(error ? error->what() : "");
    });
  EXPECT_EQ(ends[2].get_future().get(), "");
  EXPECT_EQ(ends[0].get_future().get(), "");
  EXPECT_EQ(ends[1].get_future().get(), "absent: does not exist; the weights are those of before");
  EXPECT_EQ(answer_of("0").tokens[0], expected({1}, 0, 5000));
  for (const auto& engine : engines_) EXPECT_EQ(engine.weights, 2000);
}

TEST_F(EngineFleetTest, UpdatesTheOthersWhereAnEngineIsLost) {
  engines_[1].lost = true;
  const auto update = [&](const char* checkpoint) {
    return result_of([&](auto done) {
      fleet_.update_weights({checkpoint, ""}, PauseMode::kWait, done);
    });
  };
  EXPECT_EQ(update("new"), "");
  EXPECT_EQ(update("new"), "");
  EXPECT_EQ(update("absent"), "absent: does not exist; the weights are those of before");
  EXPECT_EQ(engines_[0].weights, 2000);
  EXPECT_EQ(engines_[1].weights, 0);
  EXPECT_EQ(engines_[2].weights, 2000);
  EXPECT_FALSE(fleet_.statuses()[1].has_value());
  engines_[2].lost = true;
  EXPECT_EQ(result_of([&](auto done) { fleet_.sleep(1, PauseMode::kAbort, done); }), "");
  EXPECT_EQ(engines_[0].sleeps, 1);
}

TEST_F(EngineFleetTest, ReportsTheLossOfItsLastEngine) {
  for (auto& engine : engines_) engine.lost = true;
  EXPECT_EQ(result_of([&](auto done) { fleet_.sleep(1, PauseMode::kAbort, done); }),
            "missing: rank 1");
}

TEST_F(EngineFleetTest, DrawsAgainWhatWaitedWhereAnEngineIsLost) {
  result_of([&](auto done) { fleet_.pause(PauseMode::kKeep, done); });
  for (int i = 0; i < 6; ++i) fleet_.add_request(std::to_string(i), {i}, {.max_tokens = 5});
  engines_[0].lost = true;
  engines_[0].fails = true;
  EXPECT_EQ(result_of([&](auto done) {
              fleet_.update_weights({"new", ""}, PauseMode::kKeep, done);
            }),
            "");
  result_of([&](auto done) { fleet_.resume(done); });
  for (int i = 0; i < 6; ++i) EXPECT_EQ(answer_of(std::to_string(i)).tokens[0].size(), 5);
  EXPECT_EQ(engines_[0].num_steps, 0);
}

TEST_F(EngineFleetTest, EndsWhatIsAborted) {
  fleet_.add_request("0", {1}, {.max_tokens = 1'000'000'000});
  wait([&] { return answers_["0"].tokens[0].size() > 3; });
  fleet_.abort("0");
  fleet_.add_request("1", {2}, {.max_tokens = 2});
  EXPECT_EQ(answer_of("1").tokens[0], expected({2}, 0, 2));
  EXPECT_EQ(engines_[0].num_aborted, 1);
}

}  // namespace engine_fleet_test
}  // namespace ferry::serve
