// An engine of another rank, whose loop is on this one.
#include "serve/bridge/remote_engine.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "models/distributed/world.h"
#include "tests/serve/fake_engine.h"
#include "tests/support/expect.h"

namespace ferry::serve {
namespace remote_engine_test {

using fake_engine::FakeEngine;
using fake_engine::token_of;
using rollout::RequestOutput;
using support::fails;

// `body` has the engine of rank 1, which is `mine`, until it returns.
void with_remote(EngineSteps& mine, const std::function<void(RemoteEngine&)>& body) {
  models::run_ranks(2, {}, [&](models::World& world) {
    const models::Mailbox mail(world, "engine", {.limit = std::chrono::minutes(5)});
    if (world.rank() == 1) return answer_calls(mine, mail);
    RemoteEngine remote(mail, 1);
    body(remote);
    remote.end();
  });
}

TEST(RemoteEngine, GivesTheTokensOfItsEngine) {
  FakeEngine engine;
  with_remote(engine, [](RemoteEngine& remote) {
    EXPECT_FALSE(remote.has_unfinished());
    remote.add_request("a", {1, 2}, {.n = 2, .seed = 5, .max_tokens = 2}, nullptr);
    EXPECT_TRUE(remote.has_unfinished());  // before the other rank knows of it
    auto outputs = remote.step();
    ASSERT_EQ(outputs.size(), 1U);
    EXPECT_EQ(outputs[0].request_id, "a");
    EXPECT_FALSE(outputs[0].finished);
    ASSERT_EQ(outputs[0].outputs.size(), 2U);
    EXPECT_EQ(outputs[0].outputs[1].tokens.at(0).token_id, token_of({1, 2}, 5, 1, 1));
    EXPECT_EQ(remote.stats().num_running, 1);
    outputs = remote.step();
    EXPECT_TRUE(outputs.at(0).finished);
    EXPECT_EQ(outputs[0].outputs[0].finish_reason, rollout::FinishReason::kLength);
    EXPECT_FALSE(remote.has_unfinished());
    EXPECT_EQ(remote.stats().num_running, 0);
  });
  EXPECT_EQ(engine.num_steps, 2);
}

TEST(RemoteEngine, SendsAbortsWithTheNextCall) {
  FakeEngine engine;
  with_remote(engine, [&](RemoteEngine& remote) {
    remote.add_request("a", {1}, {.max_tokens = 9}, nullptr);
    remote.add_request("b", {2}, {.max_tokens = 9}, nullptr);
    remote.abort("a");
    remote.abort("c", 1);
    EXPECT_EQ(engine.num_aborted, 0);
    const auto outputs = remote.step();
    ASSERT_EQ(outputs.size(), 1U);
    EXPECT_EQ(outputs[0].request_id, "b");
    EXPECT_EQ(engine.num_aborted, 2);
  });
}

TEST(RemoteEngine, ThrowsWhatItsEngineThrowsAndGoesOn) {
  FakeEngine engine;
  with_remote(engine, [&](RemoteEngine& remote) {
    engine.fails = true;
    EXPECT_TRUE(fails(ErrorKind::kDevice, {"the device is lost"}, [&] { remote.step(); }));
    EXPECT_TRUE(fails(ErrorKind::kDevice, {"the device is lost"}, [&] { remote.idle(); }));
    EXPECT_FALSE(remote.is_lost());
    engine.fails = false;
    EXPECT_TRUE(remote.step().empty());
  });
}

TEST(RemoteEngine, IsLostWhereItsEngineIs) {
  FakeEngine engine;
  engine.fails = engine.lost = true;
  models::run_ranks(2, {}, [&](models::World& world) {
    const models::Mailbox mail(world, "engine", {.limit = std::chrono::minutes(5)});
    if (world.rank() == 1) {
      EXPECT_TRUE(
          fails(ErrorKind::kDevice, {"the device is lost"}, [&] { answer_calls(engine, mail); }));
      return;
    }
    RemoteEngine remote(mail, 1);
    remote.add_request("a", {1}, {}, nullptr);
    EXPECT_TRUE(fails(ErrorKind::kDevice, {"the device is lost"}, [&] { remote.step(); }));
    EXPECT_TRUE(remote.is_lost());
    remote.end();
  });
}

TEST(RemoteEngine, OpensWeightsBeforeItLoadsThem) {
  FakeEngine engine;
  with_remote(engine, [&](RemoteEngine& remote) {
    EXPECT_TRUE(fails(ErrorKind::kNotFound, {"absent: does not exist"},
                      [&] { remote.open_weights({.checkpoint = "absent"}); }));
    engine.opening = true;
    remote.begin_open_weights({.checkpoint = "new"});
    EXPECT_TRUE(remote.is_opening());
    engine.opening = false;
    remote.idle();
    EXPECT_FALSE(remote.is_opening());
    const auto load = remote.open_weights({.checkpoint = "new"});
    EXPECT_EQ(engine.weights, 0);
    load();
    EXPECT_EQ(engine.weights, 1000);
    EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"damaged: is cut short"},
                      [&] { remote.open_weights({.checkpoint = "damaged"})(); }));
  });
}

TEST(RemoteEngine, PassesEveryCommandOn) {
  FakeEngine engine;
  with_remote(engine, [&](RemoteEngine& remote) {
    remote.sleep(2);
    EXPECT_EQ(engine.sleeps, 2);
    remote.wake_up();
    EXPECT_EQ(engine.sleeps, 0);
    remote.reset_prefix_cache();
    remote.idle();
  });
  EXPECT_EQ(engine.num_resets, 1);
  EXPECT_EQ(engine.num_idle, 1);
}

// An engine whose one step gives an output in which everything is set.
class TellingEngine : public FakeEngine {
 public:
  std::vector<RequestOutput> step() override {
    RequestOutput output{.request_id = "a", .finished = true};
    auto& sample = output.outputs.emplace_back();
    sample.index = 3;
    sample.tokens = {{.token_id = 7,
                      .logprob = -0.1F,
                      .processed_logprob = -0.7F,
                      .top = {{.token_id = 8, .logprob = -1.5F}}}};
    sample.finish_reason = rollout::FinishReason::kStop;
    sample.stop_reason = 258;
    output.prompt_logprobs = {
        {.token_id = 5, .logprob = -0.3F, .rank = 2, .top = {{.token_id = 6, .logprob = -0.2F}}}};
    RequestOutput rejected{.request_id = "b", .finished = true};
    rejected.error = Error(ErrorKind::kUsage, "too long");
    return {output, rejected};
  }
  rollout::EngineStats stats() const override {
    return {.num_blocks = 1,
            .num_free_blocks = 2,
            .num_waiting = 3,
            .num_running = 4,
            .num_preemptions = 5,
            .prompt_tokens = 6,
            .cached_tokens = 7,
            .output_tokens = 8,
            .steps = 9};
  }
};

TEST(RemoteEngine, KeepsAllOfAnAnswer) {
  TellingEngine engine;
  with_remote(engine, [](RemoteEngine& remote) {
    const auto outputs = remote.step();
    ASSERT_EQ(outputs.size(), 2U);
    const auto& sample = outputs[0].outputs.at(0);
    EXPECT_EQ(sample.index, 3);
    EXPECT_EQ(sample.tokens.at(0).logprob, -0.1F);
    EXPECT_EQ(sample.tokens[0].processed_logprob, -0.7F);
    EXPECT_EQ(sample.tokens[0].top.at(0).token_id, 8);
    EXPECT_EQ(sample.tokens[0].top[0].logprob, -1.5F);
    EXPECT_EQ(sample.stop_reason, 258);
    const auto& prompt = outputs[0].prompt_logprobs.at(0);
    EXPECT_EQ(prompt.token_id, 5);
    EXPECT_EQ(prompt.logprob, -0.3F);
    EXPECT_EQ(prompt.rank, 2);
    EXPECT_EQ(prompt.top.at(0).logprob, -0.2F);
    ASSERT_TRUE(outputs[1].error);
    EXPECT_TRUE(support::is_error(*outputs[1].error, ErrorKind::kUsage, {"too long"}));
    const auto stats = remote.stats();
    EXPECT_EQ(stats.num_blocks, 1);
    EXPECT_EQ(stats.num_free_blocks, 2);
    EXPECT_EQ(stats.num_waiting, 3);
    EXPECT_EQ(stats.num_running, 4);
    EXPECT_EQ(stats.num_preemptions, 5);
    EXPECT_EQ(stats.prompt_tokens, 6);
    EXPECT_EQ(stats.cached_tokens, 7);
    EXPECT_EQ(stats.output_tokens, 8);
    EXPECT_EQ(stats.steps, 9);
  });
}

}  // namespace remote_engine_test
}  // namespace ferry::serve
