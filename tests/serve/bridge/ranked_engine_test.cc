// The engines of a tensor parallel group, whose first rank tells the others its calls.
#include "serve/bridge/ranked_engine.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "models/distributed/failure_board.h"
#include "tests/serve/fake_engine.h"
#include "tests/support/expect.h"

namespace ferry::serve {
namespace ranked_engine_test {

using support::fails;

// Refuses prompts that are empty, as an engine does on each of its ranks.
class RefusingEngine : public fake_engine::FakeEngine {
 public:
  void add_request(const std::string& id,
                   const std::vector<std::int64_t>& prompt,
                   const rollout::SamplingParams& params,
                   const ImageFiles& images) override {
    require(!prompt.empty(), ErrorKind::kUsage, "prompt: is empty");
    FakeEngine::add_request(id, prompt, params, images);
  }
};

class RankedEngines : public testing::Test {
 protected:
  // `first` and `other` are what the two ranks do.
  void run(const std::function<void(RankedEngine&)>& first,
           const std::function<void(const std::function<void()>& follow)>& other) {
    models::run_ranks(2, {}, [&](models::World& world) {
      const models::Mailbox mail(world, "serve", {.limit = std::chrono::minutes(5)});
      if (world.rank() == 1) return other([&] { follow(of_other_, world, mail, 0); });
      RankedEngine engine(of_first_, world, mail, 2);
      first(engine);
      engine.end();
    });
  }

  RefusingEngine of_first_, of_other_;
};

TEST_F(RankedEngines, TakeTheSameSteps) {
  run(
      [](RankedEngine& engine) {
        engine.add_request("a", {1, 2}, {.max_tokens = 2}, nullptr);
        EXPECT_EQ(engine.step().size(), 1U);
        EXPECT_TRUE(engine.step().at(0).finished);
        engine.sleep(1);
      },
      [](const auto& follow) { follow(); });
  EXPECT_EQ(of_other_.num_steps, 2);
  EXPECT_EQ(of_other_.sleeps, 1);
}

TEST_F(RankedEngines, GoOnAfterARequestThatAllRefuse) {
  run(
      [](RankedEngine& engine) {
        EXPECT_TRUE(fails(ErrorKind::kUsage, {"prompt: is empty"},
                          [&] { engine.add_request("a", {}, {}, nullptr); }));
        engine.add_request("b", {1}, {.max_tokens = 1}, nullptr);
        EXPECT_TRUE(engine.step().at(0).finished);
        EXPECT_FALSE(engine.is_lost());
      },
      [](const auto& follow) { follow(); });
  EXPECT_EQ(of_other_.num_steps, 1);
}

TEST_F(RankedEngines, GoOnAfterWeightsThatOneDoesNotTake) {
  of_other_.refused = "other";
  run(
      [](RankedEngine& engine) {
        EXPECT_TRUE(fails(ErrorKind::kUsage, {"other: is another model"},
                          [&] { engine.open_weights({.checkpoint = "other"}); }));
        EXPECT_FALSE(engine.is_lost());
      },
      [](const auto& follow) { follow(); });
}

TEST_F(RankedEngines, AreLostWhereAStepFailsOnTheFirstRank) {
  of_first_.fails = true;
  run(
      [](RankedEngine& engine) {
        engine.add_request("a", {1}, {}, nullptr);
        for (int i = 0; i < 2; ++i)
          EXPECT_TRUE(fails(ErrorKind::kDevice, {"the device is lost"}, [&] { engine.step(); }));
        EXPECT_TRUE(engine.is_lost());
        EXPECT_TRUE(fails(ErrorKind::kDevice, {"the device is lost"}, [&] { engine.idle(); }));
      },
      [](const auto& follow) {
        EXPECT_TRUE(fails(ErrorKind::kIo, {"rank 0, which failed: the device is lost"}, follow));
      });
}

TEST_F(RankedEngines, AreLostWhereAStepFailsOnAnotherRank) {
  of_other_.fails = true;
  run(
      [](RankedEngine& engine) {
        engine.add_request("a", {1}, {}, nullptr);
        const auto begin = std::chrono::steady_clock::now();
        const auto steps = [&] {
          for (int i = 0; i < 100; ++i) {
            engine.step();
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
          }
        };
        EXPECT_TRUE(fails(ErrorKind::kIo, {"rank 1, which failed: the device is lost"}, steps));
        EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(9));
        EXPECT_TRUE(engine.is_lost());
      },
      [](const auto& follow) {
        EXPECT_TRUE(fails(ErrorKind::kDevice, {"the device is lost"}, follow));
      });
}

}  // namespace ranked_engine_test
}  // namespace ferry::serve
