// Runs an engine for a server: requests and commands come from other threads, and take effect
// between two steps. The engine is an interface, so that this needs no LibTorch.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "rollout/request_output.h"
#include "rollout/schedule/sampling_params.h"
#include "serve/api/served_model.h"

namespace ferry::serve {

struct WeightSource {
  std::string checkpoint{};  // in any format; empty: that of the last update
  std::string iteration{};   // of a Megatron checkpoint; empty: the tracker's
  // Applied to it; without a checkpoint to the weights of the last update. Empty: none.
  std::string delta{};
  // Nothing of the above, but the weights that there were when some were loaded last.
  bool are_previous = false;
};

// rollout::LLMEngine as the loop uses it; bridge/rollout_engine.h is the real one.
class EngineSteps {
 public:
  virtual ~EngineSteps() = default;
  virtual void add_request(const std::string& request_id,
                           const std::vector<std::int64_t>& prompt_token_ids,
                           const rollout::SamplingParams& params,
                           const ImageFiles& images) = 0;
  virtual void abort(const std::string& request_id) = 0;
  virtual void abort(const std::string& request_id, std::int64_t index) = 0;
  virtual bool has_unfinished() const = 0;
  virtual std::vector<rollout::RequestOutput> step() = 0;
  virtual rollout::EngineStats stats() const = 0;
  virtual void reset_prefix_cache() = 0;
  // Begins to open a checkpoint in the background, for the open_weights() of the same source that
  // follows. Other calls may come before. Errors are thrown by open_weights().
  virtual void begin_open_weights(const WeightSource& /*source*/) {}
  // True if open_weights() would wait for what was begun; a rank elsewhere says so with its
  // answers.
  virtual bool is_opening() const { return false; }
  // Opens a checkpoint, or throws before any weight has changed. The result loads it, once; other
  // calls may come before. Previous weights are an Error(kIo) where their files are not what they
  // were.
  virtual std::function<void()> open_weights(const WeightSource& source) = 0;
  virtual void sleep(int level) = 0;
  virtual void wake_up() = 0;
  // Called every few seconds while there is nothing to do.
  virtual void idle() {}
  // True if every call fails from now on: the engine has gone, or its ranks are no more alike.
  virtual bool is_lost() const { return false; }
};

// The fate of requests under way when generation pauses or weights change (vLLM's modes of pause).
enum class PauseMode : std::uint8_t {
  kWait,   // they are answered first; new ones wait
  kKeep,   // they stop where they are, and go on afterwards
  kAbort,  // they end with finish reason "abort"
};

struct EngineStatus {
  rollout::EngineStats stats{};
  std::int64_t num_held = 0;  // requests that wait for resume(), or for a pause to begin
  bool is_paused = false;
  bool is_sleeping = false;
  bool lacks_weights = false;       // after sleep(2), or while they change: an update has to come
  std::int64_t weight_version = 0;  // the number of updates
};

class EngineLoop {
 public:
  // Called on the engine's thread after a step, and when something else changed.
  using OnOutputs = std::function<void(std::vector<rollout::RequestOutput>, const EngineStatus&)>;
  // Called on the engine's thread when a command is done, with the error that it met.
  using Done = std::function<void(const std::optional<Error>&)>;

  // The engine outlives this.
  explicit EngineLoop(EngineSteps& engine) : engine_(engine) {}
  void on_outputs(OnOutputs callback) { on_outputs_ = std::move(callback); }
  // Called on the engine's thread when a step failed, or idle(), or the engine is lost. If it
  // returns true, somebody else answers all requests under way, and this engine answers no more:
  // each command meets the error. Else, and by default, those requests end with the error.
  void on_failure(std::function<bool(const Error&)> callback) { on_failure_ = std::move(callback); }

  // Runs steps until stop(), on the thread that the engine was made on. Throws what idle() throws,
  // and the error by which the engine was lost where nobody else answers its requests: they have
  // ended with it.
  void run();

  // The rest is thread-safe. A request's last output is `finished`. If it ends by
  // PauseMode::kAbort, that output has no tokens; if a step failed, it has the error.
  void add_request(std::string request_id,
                   std::vector<std::int64_t> prompt_token_ids,
                   rollout::SamplingParams params,
                   ImageFiles images = nullptr);
  void abort(std::string request_id);  // without further output
  void abort(std::string request_id, std::int64_t index);
  void pause(PauseMode mode, Done done);
  void resume(Done done);
  void reset_prefix_cache(Done done);
  // Other weights, in three steps, so that several engines change theirs together or not at all.
  // Opens them while steps are taken: nothing pauses, nothing changes.
  void open_weights(WeightSource source, Done done);
  // Loads what was opened. No step is taken from then on, and further commands wait. Requests that
  // go on (kKeep) compute their tokens so far again, with the new weights.
  void load_weights(PauseMode mode, Done done);
  // Goes on, with the new weights, or else with those of before, which are loaded again where
  // load_weights() had begun to change them.
  void end_update(bool succeeded, Done done);
  void sleep(int level, PauseMode mode, Done done);
  void wake_up(Done done);
  void stop();

 private:
  struct NewRequest {
    std::string id{};
    std::vector<std::int64_t> prompt{};
    rollout::SamplingParams params{};
    ImageFiles images{};
  };
  using Command = std::function<void()>;
  struct QuietCommand {  // runs `body` when requests under way are dealt with as `mode` says
    PauseMode mode = PauseMode::kKeep;
    std::function<void()> body{};
    Done done{};
    bool in_order = false;  // behind commands that wait until requests are answered
  };

  void post(Command command);
  void post_quiet(QuietCommand command);
  void begin(const QuietCommand& command);
  void act(const QuietCommand& command);
  void release_commands();
  void admit(NewRequest request);
  void abort_all(const std::optional<Error>& error);
  void fail(const Error& error);
  bool hand_over(const Error& error);
  void finish_draining();
  bool may_step() const;
  bool has_work() const;
  void step();
  void idle();
  void load();
  void take_opened();
  void take_weights(bool succeeded);
  void report(std::vector<rollout::RequestOutput> outputs);
  static std::optional<Error> attempt(const std::function<void()>& body);

  EngineSteps& engine_;
  OnOutputs on_outputs_{};
  std::function<bool(const Error&)> on_failure_{};

  std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<Command> commands_;
  bool stopping_ = false;

  // On the engine's thread alone.
  EngineStatus status_{};
  std::optional<Error> handed_over_;  // the failure after which others answer
  std::optional<Error> lost_;         // by which the engine was lost, and nobody does
  std::deque<NewRequest> held_;
  std::set<std::string> under_way_;
  std::deque<Command> after_draining_;   // commands that wait until nothing is under way
  std::optional<QuietCommand> opening_;  // takes the weights of the next update, once they are open
  std::function<void()> opened_;         // loads them
  bool is_updating_ = false;             // since they began to be loaded
  bool lacked_weights_ = false;          // before
  std::vector<QuietCommand> after_update_;
  std::vector<rollout::RequestOutput> to_report_;
};

}  // namespace ferry::serve
