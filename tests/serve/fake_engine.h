// An engine without a model: each token of an answer is a function of the prompt, the seed, the
// sample and the position.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <future>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "serve/engine_loop.h"

namespace ferry::serve::fake_engine {

using rollout::FinishReason;
using rollout::RequestOutput;

inline std::int64_t token_of(const std::vector<std::int64_t>& prompt,
                             std::uint64_t seed,
                             std::int64_t index,
                             std::int64_t position) {
  auto hash = seed * 31 + static_cast<std::uint64_t>(index * 7 + position);
  for (const auto id : prompt) hash = hash * 33 + static_cast<std::uint64_t>(id);
  return static_cast<std::int64_t>(hash % 90);
}

inline std::vector<rollout::PromptTokenOutput> prompt_logprobs_of(
    const std::vector<std::int64_t>& prompt, std::int64_t most) {
  std::vector<rollout::PromptTokenOutput> all;
  for (std::size_t i = 1; i < prompt.size(); ++i) {
    auto& one = all.emplace_back();
    one = {.token_id = prompt[i], .logprob = -1.25F, .rank = most + 1};
    for (std::int64_t id = 0; id < most; ++id)
      one.top.push_back({.token_id = id, .logprob = -1.0F});
  }
  return all;
}

class FakeEngine : public EngineSteps {
 public:
  void add_request(const std::string& id,
                   const std::vector<std::int64_t>& prompt,
                   const rollout::SamplingParams& params,
                   const ImageFiles& /*images*/) override {
    requests_[id] = {prompt, params, 0};
  }
  void abort(const std::string& id) override {
    requests_.erase(id);
    ++num_aborted;
  }
  void abort(const std::string& id, std::int64_t) override { abort(id); }
  bool has_unfinished() const override { return !requests_.empty(); }

  std::vector<RequestOutput> step() override {
    require(!fails, ErrorKind::kDevice, "the device is lost");
    std::vector<RequestOutput> outputs;
    for (auto at = requests_.begin(); at != requests_.end();) {
      auto& [prompt, params, drawn] = at->second;
      ++drawn;
      const bool stops = token_of(prompt, params.seed.value_or(0), 0, drawn) == stop_token;
      const bool is_last = stops || drawn >= params.max_tokens;
      RequestOutput output{.request_id = at->first, .finished = is_last};
      if (params.prompt_logprobs && drawn == 1)
        output.prompt_logprobs = prompt_logprobs_of(prompt, *params.prompt_logprobs);
      for (std::int64_t i = 0; i < params.n; ++i) {
        auto& sample = output.outputs.emplace_back();
        sample.index = i;
        sample.tokens.push_back(
            {.token_id = token_of(prompt, params.seed.value_or(0), i, drawn) + weights});
        if (is_last) sample.finish_reason = stops ? FinishReason::kStop : FinishReason::kLength;
        if (stops) sample.stop_reason = stop_token;
      }
      outputs.push_back(std::move(output));
      at = is_last ? requests_.erase(at) : std::next(at);
    }
    ++num_steps;
    return outputs;
  }

  rollout::EngineStats stats() const override {
    return {.num_running = static_cast<std::int64_t>(requests_.size())};
  }
  void reset_prefix_cache() override { ++num_resets; }
  bool is_lost() const override { return lost; }
  void begin_open_weights(const WeightSource& /*source*/) override { ++num_begun; }
  bool is_opening() const override { return opening; }
  std::function<void()> open_weights(const WeightSource& source) override {
    require(!lost, ErrorKind::kIo, "missing: rank 1");
    require(source.checkpoint != "absent", ErrorKind::kNotFound, "absent: does not exist");
    require(source.checkpoint != refused, ErrorKind::kUsage, "{}: is another model", refused);
    require(!source.are_previous || !old_files_changed, ErrorKind::kIo, "old: has changed");
    return [this, source] {
      if (source.are_previous) {
        weights = loaded_ = previous_;
        return;
      }
      previous_ = loaded_;
      weights = kDamaged;
      require(source.checkpoint != "damaged" && !fails_to_load, ErrorKind::kCorrupt,
              "{}: is cut short", source.checkpoint);
      loaded_ += 1000;
      weights = loaded_;
    };
  }
  void idle() override {
    ++num_idle;
    require(!fails, ErrorKind::kDevice, "the device is lost");
  }
  void sleep(int level) override {
    require(!lost, ErrorKind::kIo, "missing: rank 1");
    sleeps = level;
  }
  void wake_up() override { sleeps = 0; }

  std::atomic<bool> opening = false;  // open_weights() would wait
  std::atomic<int> num_begun = 0, num_aborted = 0, num_steps = 0, num_resets = 0, num_idle = 0,
                   sleeps = 0;
  std::atomic<std::int64_t> weights = 0;
  std::atomic<bool> fails = false, lost = false, old_files_changed = false, fails_to_load = false;
  std::int64_t stop_token = -1;  // of the first sample ends a request
  std::string refused = "none";  // a checkpoint that this engine alone does not take

 private:
  static constexpr std::int64_t kDamaged = -1000;
  struct Request {
    std::vector<std::int64_t> prompt{};
    rollout::SamplingParams params{};
    std::int64_t drawn = 0;
  };
  std::map<std::string, Request> requests_;
  std::int64_t loaded_ = 0, previous_ = 0;
};

// An EngineLoop or an EngineFleet on a thread of its own.
template <typename Loop>
class Running {
 public:
  // NOLINTNEXTLINE(bugprone-forwarding-reference-overload): nothing copies it
  explicit Running(auto&& engines) : loop(engines) {}
  ~Running() {
    loop.stop();
    if (thread_.joinable()) thread_.join();
  }
  void start() {
    thread_ = std::thread([this] { loop.run(); });
  }

  Loop loop;

 private:
  std::thread thread_;
};

// Gathers what an EngineLoop or an EngineFleet says.
class AnswersTest : public testing::Test {
 protected:
  struct Answer {
    std::map<std::int64_t, std::vector<std::int64_t>> tokens{};  // of each sample
    bool finished = false;
    std::string error{};
  };

  // For on_outputs().
  void hear(const std::vector<RequestOutput>& outputs, const EngineStatus& now) {
    const std::lock_guard lock(mutex_);
    for (const auto& output : outputs) {
      auto& answer = answers_[output.request_id];
      for (const auto& sample : output.outputs)
        for (const auto& token : sample.tokens)
          answer.tokens[sample.index].push_back(token.token_id);
      answer.finished = answer.finished || output.finished;
      if (output.error) answer.error = output.error->what();
    }
    status_ = now;
    changed_.notify_all();
  }
  // `condition` may read answers_ and status_.
  void wait(const std::function<bool()>& condition) {
    std::unique_lock lock(mutex_);
    ASSERT_TRUE(changed_.wait_for(lock, std::chrono::seconds(20), condition));
  }
  // The whole answer.
  Answer answer_of(const std::string& id) {
    wait([&] { return answers_[id].finished; });
    const std::lock_guard lock(mutex_);
    return answers_[id];
  }
  // The message of the error that a command meets; empty: none.
  static std::string result_of(const std::function<void(EngineLoop::Done)>& command) {
    std::promise<std::string> result;
    command(
        [&](const std::optional<Error>& error) { result.set_value(error ? error->what() : ""); });
    return result.get_future().get();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, Answer> answers_;
  EngineStatus status_{};
};

}  // namespace ferry::serve::fake_engine
