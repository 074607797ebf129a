// Calls of an engine that have gone to another rank as bytes, and are made there.
#include "serve/bridge/engine_calls.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "distckpt/base/cbor.h"
#include "tests/support/expect.h"

namespace ferry::serve {
namespace engine_calls_test {

using nlohmann::json;
using support::fails;

// Notes what it is asked.
class NotingEngine : public EngineSteps {
 public:
  void add_request(const std::string& request_id,
                   const std::vector<std::int64_t>& prompt_token_ids,
                   const rollout::SamplingParams& params,
                   const ImageFiles& images) override {
    notes.push_back("add_request " + request_id);
    prompt = prompt_token_ids;
    sampling = params;
    files = images;
  }
  void abort(const std::string& request_id) override { notes.push_back("abort " + request_id); }
  void abort(const std::string& request_id, std::int64_t index) override {
    notes.push_back("abort " + request_id + " " + std::to_string(index));
  }
  bool has_unfinished() const override { return false; }
  std::vector<rollout::RequestOutput> step() override { return {{.request_id = "stepped"}}; }
  rollout::EngineStats stats() const override { return {}; }
  void reset_prefix_cache() override { notes.emplace_back("reset_prefix_cache"); }
  std::function<void()> open_weights(const WeightSource& source) override {
    notes.push_back("open " + source.checkpoint + " " + source.iteration + " " + source.delta);
    require(source.checkpoint != "absent", ErrorKind::kNotFound, "absent: does not exist");
    return [this, name = source.checkpoint] { notes.push_back("load " + name); };
  }
  void sleep(int level) override { notes.push_back("sleep " + std::to_string(level)); }
  void wake_up() override { notes.emplace_back("wake_up"); }
  void idle() override {}
  bool is_lost() const override { return false; }

  std::vector<std::string> notes{};
  std::vector<std::int64_t> prompt{};
  rollout::SamplingParams sampling{};
  ImageFiles files{};
};

class EngineCalls : public testing::Test {
 protected:
  std::vector<rollout::RequestOutput> make(const json& call) {
    return make_call(called_, from_cbor<json>(to_cbor(call)));
  }

  NotingEngine engine_;
  CalledEngine called_{engine_};
};

TEST_F(EngineCalls, CarryTheSettingsOfTheDraw) {
  make(add_request_call("r", {1, 2}, {.top_k = 7, .return_entropy = true}, nullptr));
  EXPECT_EQ(engine_.notes, (std::vector<std::string>{"add_request r"}));
  EXPECT_EQ(engine_.prompt, (std::vector<std::int64_t>{1, 2}));
  EXPECT_EQ(engine_.sampling.top_k, 7);
  EXPECT_TRUE(engine_.sampling.return_entropy);
}

TEST_F(EngineCalls, CarryImagesAsTheyAre) {
  const std::vector<std::string> files{std::string("\0\xff", 2), "b"};
  make(add_request_call("r", {1}, {}, std::make_shared<const std::vector<std::string>>(files)));
  ASSERT_NE(engine_.files, nullptr);
  EXPECT_EQ(*engine_.files, files);
  make(add_request_call("r", {1}, {}, nullptr));
  EXPECT_EQ(engine_.files, nullptr);
}

TEST_F(EngineCalls, AbortARequestOrASampleOfIt) {
  make(abort_call("r"));
  make(abort_call("r", 0));
  EXPECT_EQ(engine_.notes, (std::vector<std::string>{"abort r", "abort r 0"}));
}

TEST_F(EngineCalls, ReturnTheOutputsOfAStep) {
  const auto outputs = make(json::array({"step"}));
  ASSERT_EQ(outputs.size(), 1U);
  EXPECT_EQ(outputs[0].request_id, "stepped");
}

TEST_F(EngineCalls, LoadTheWeightsThatWereOpened) {
  make(open_weights_call({.checkpoint = "new", .iteration = "7", .delta = "change"}));
  make(json::array({"load_weights"}));
  EXPECT_EQ(engine_.notes, (std::vector<std::string>{"open new 7 change", "load new"}));
}

TEST_F(EngineCalls, LoadNothingAfterWeightsThatCouldNotBeOpened) {
  make(open_weights_call({.checkpoint = "new"}));
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"absent"},
                    [&] { make(open_weights_call({.checkpoint = "absent"})); }));
  EXPECT_TRUE(
      fails(ErrorKind::kIo, {"could not be opened"}, [&] { make(json::array({"load_weights"})); }));
}

TEST_F(EngineCalls, SleepAndWakeTheEngine) {
  make(json::array({"sleep", 2}));
  make(json::array({"wake_up"}));
  make(json::array({"reset_prefix_cache"}));
  EXPECT_EQ(engine_.notes, (std::vector<std::string>{"sleep 2", "wake_up", "reset_prefix_cache"}));
}

}  // namespace engine_calls_test
}  // namespace ferry::serve
