// Engines with the same weights as one: a request goes to the engine that has most of its prompt in
// the cache, or least to do. If an engine fails, its requests go on at another one: a token is a
// function of weights, prompt, seed and parameters, so that the same tokens come again, and those
// that have been delivered are dropped. A request whose tokens are of other weights than those
// there (PauseMode::kKeep) ends with an error. The failed engine stays out of all that follows.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "serve/engine_loop.h"

namespace ferry::serve {

class EngineFleet {
 public:
  using Done = EngineLoop::Done;
  // The outputs of an engine, and the status of all together.
  using OnOutputs = std::function<void(
      std::size_t engine, std::vector<rollout::RequestOutput>, const EngineStatus&)>;

  // The engines outlive this.
  explicit EngineFleet(const std::vector<EngineSteps*>& engines);
  ~EngineFleet();
  std::size_t size() const { return engines_.size(); }
  // Called on the engines' threads, by one at a time.
  void on_outputs(OnOutputs callback) { on_outputs_ = std::move(callback); }

  // Runs the first engine on the caller's thread, where it was made, and the others on threads of
  // their own, until stop(). Throws what an engine's idle() throws if no other is left.
  void run();

  // The rest is thread-safe. The last status of each engine; nothing of those that have failed.
  std::vector<std::optional<EngineStatus>> statuses() const;

  // EngineLoop has these under the same names: for all engines, but those that have failed, or fail
  // meanwhile. `done` has the first error that one of the others met, and the thread of an engine.
  void add_request(std::string request_id,
                   std::vector<std::int64_t> prompt_token_ids,
                   rollout::SamplingParams params,
                   ImageFiles images = nullptr);
  void abort(std::string request_id);
  void abort(std::string request_id, std::int64_t index);
  void pause(PauseMode mode, const Done& done);
  void resume(const Done& done);
  void reset_prefix_cache(const Done& done);
  // Other weights for all engines, or for none: they are opened first, while requests go on, and
  // loaded when all could be opened. If that fails, the weights are those of before. Updates come
  // one behind another.
  void update_weights(WeightSource source, PauseMode mode, Done done);
  void sleep(int level, PauseMode mode, const Done& done);
  void wake_up(const Done& done);
  void stop();

 private:
  struct Request {
    std::vector<std::int64_t> prompt{};
    rollout::SamplingParams params{};
    ImageFiles images{};
    std::size_t engine = 0;
    std::vector<std::size_t> delivered{};          // tokens, by sample
    std::vector<std::size_t> to_drop{};            // of them, that come again
    std::vector<bool> is_over{};                   // samples
    std::optional<std::int64_t> weight_version{};  // of the tokens that were delivered
    bool has_other_weights = false;                // some of them are of another version
  };
  struct Update {
    WeightSource source{};
    PauseMode mode = PauseMode::kWait;
    Done done{};
  };
  struct Engine {
    std::unique_ptr<EngineLoop> loop{};
    EngineStatus status{};
    bool has_failed = false;
    std::int64_t num_samples = 0;                       // under way
    std::unordered_set<std::uint64_t> prompt_blocks{};  // beginnings of prompts, by hash
  };

  std::size_t choose(const std::vector<std::int64_t>& prompt);
  void take(std::size_t engine,
            std::vector<rollout::RequestOutput> outputs,
            const EngineStatus& status);
  bool drop_delivered(Request& request, rollout::RequestOutput& output) const;
  static bool comes_again(const Request& request, const EngineStatus& status);
  void forget_prompts();
  bool move_requests(std::size_t engine, const Error& error);
  EngineStatus whole_status() const;
  void for_all(const Done& done, const std::function<void(EngineLoop&, Done)>& command);
  void begin_update();
  void end_update(const std::optional<Error>& error);
  Error update_error(const Error& error, const std::optional<Error>& of_old_weights) const;

  OnOutputs on_outputs_{};
  std::mutex delivery_;  // of outputs; taken before mutex_
  mutable std::mutex mutex_;
  std::vector<Engine> engines_;
  std::unordered_map<std::string, Request> requests_;
  std::deque<Update> updates_;  // the first is under way
};

}  // namespace ferry::serve
