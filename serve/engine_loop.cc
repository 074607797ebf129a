#include "serve/engine_loop.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "distckpt/base/foreign_error.h"

namespace ferry::serve {

using rollout::RequestOutput;

namespace {

constexpr std::chrono::milliseconds kIdle{5000};
constexpr std::chrono::milliseconds kOpening{10};  // the same while weights are opened elsewhere

}  // namespace

void EngineLoop::post(Command command) {
  {
    const std::lock_guard lock(mutex_);
    commands_.push_back(std::move(command));
  }
  arrived_.notify_one();
}

void EngineLoop::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  arrived_.notify_one();
}

std::optional<Error> EngineLoop::attempt(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return as_error(error);
  }
  return std::nullopt;
}

void EngineLoop::run() {
  while (true) {
    std::vector<Command> commands;
    {
      std::unique_lock lock(mutex_);
      arrived_.wait_for(lock, opening_ ? kOpening : kIdle,
                        [&] { return stopping_ || !commands_.empty() || has_work(); });
      if (stopping_) return;
      commands.swap(commands_);
    }
    if (commands.empty() && !has_work()) idle();
    for (const auto& command : commands) command();
    take_opened();
    finish_draining();
    if (may_step() && engine_.has_unfinished()) step();
    if (!commands.empty() || !to_report_.empty()) report(std::exchange(to_report_, {}));
    if (lost_) throw Error(*lost_);
  }
}

bool EngineLoop::may_step() const {
  return !status_.is_paused && !status_.is_sleeping && !status_.lacks_weights && !is_updating_ &&
         !handed_over_;
}

bool EngineLoop::has_work() const {
  return (may_step() && engine_.has_unfinished()) ||
         (!after_draining_.empty() && under_way_.empty() && !is_updating_);
}

void EngineLoop::step() {
  std::vector<RequestOutput> outputs;
  const auto error = attempt([&] { outputs = engine_.step(); });
  for (const auto& output : outputs) {
    if (output.finished) under_way_.erase(output.request_id);
  }
  std::ranges::move(outputs, std::back_inserter(to_report_));
  if (error) fail(*error);
}

void EngineLoop::idle() {
  if (handed_over_ && engine_.is_lost()) return;
  const auto error = attempt([&] { engine_.idle(); });
  if (error && !hand_over(*error)) throw Error(*error);
}

void EngineLoop::report(std::vector<RequestOutput> outputs) {
  if (!on_outputs_) return;
  status_.stats = engine_.stats();
  status_.num_held = static_cast<std::int64_t>(held_.size());
  on_outputs_(std::move(outputs), status_);
}

void EngineLoop::admit(NewRequest request) {
  const auto error = attempt(
      [&] { engine_.add_request(request.id, request.prompt, request.params, request.images); });
  if (error) {
    to_report_.push_back({.request_id = request.id, .finished = true, .error = error});
    if (engine_.is_lost()) fail(*error);
  } else {
    under_way_.insert(std::move(request.id));
  }
}

void EngineLoop::abort_all(const std::optional<Error>& error) {
  for (const auto& id : std::exchange(under_way_, {})) {
    engine_.abort(id);
    to_report_.push_back({.request_id = id, .finished = true, .error = error});
  }
}

// The requests go to others, or end with the error, and so does the loop where the engine is lost.
void EngineLoop::fail(const Error& error) {
  if (hand_over(error)) return;
  abort_all(error);
  if (engine_.is_lost()) lost_ = error;
}

// Returns whether somebody else answers the requests.
bool EngineLoop::hand_over(const Error& error) {
  if (handed_over_) return true;
  if (!on_failure_ || !on_failure_(error)) return false;
  handed_over_ = error;
  for (const auto& id : std::exchange(under_way_, {})) engine_.abort(id);
  held_.clear();
  is_updating_ = false;
  release_commands();
  return true;
}

// New requests wait while those under way are answered, and while generation is paused.
void EngineLoop::add_request(std::string request_id,
                             std::vector<std::int64_t> prompt_token_ids,
                             rollout::SamplingParams params,
                             ImageFiles images) {
  auto shared = std::make_shared<NewRequest>(NewRequest{
      std::move(request_id), std::move(prompt_token_ids), std::move(params), std::move(images)});
  post([this, shared] {
    if (handed_over_) return;
    if (may_step() && after_draining_.empty()) return admit(std::move(*shared));
    held_.push_back(std::move(*shared));
  });
}

void EngineLoop::abort(std::string request_id) {
  post([this, id = std::move(request_id)] {
    std::erase_if(held_, [&](const NewRequest& request) { return request.id == id; });
    if (under_way_.erase(id) > 0) engine_.abort(id);
  });
}

void EngineLoop::abort(std::string request_id, std::int64_t index) {
  post([this, id = std::move(request_id), index] {
    if (under_way_.contains(id)) engine_.abort(id, index);
  });
}

// Runs commands that waited until nothing was under way, then lets requests in that waited.
void EngineLoop::finish_draining() {
  while (!after_draining_.empty() && under_way_.empty() && !is_updating_) {
    const auto command = std::move(after_draining_.front());
    after_draining_.pop_front();
    command();
  }
  if (!may_step() || !after_draining_.empty()) return;
  for (auto& request : std::exchange(held_, {})) admit(std::move(request));
}

void EngineLoop::post_quiet(QuietCommand command) {
  post([this, command = std::move(command)] { begin(command); });
}

void EngineLoop::begin(const QuietCommand& command) {
  if (is_updating_) return after_update_.push_back(command);
  const auto mode = command.mode;
  if (mode == PauseMode::kAbort) abort_all(std::nullopt);
  // If no step may run, nothing under way can finish: it is kept.
  if (may_step() && ((mode == PauseMode::kWait && !under_way_.empty()) ||
                     (command.in_order && !after_draining_.empty()))) {
    after_draining_.emplace_back([this, command] { act(command); });
  } else {
    act(command);
  }
}

void EngineLoop::act(const QuietCommand& command) {
  if (handed_over_) return command.done(handed_over_);
  const auto error = attempt(command.body);
  if (error && engine_.is_lost()) fail(*error);
  report(std::exchange(to_report_, {}));
  command.done(error);
}

// Begins the commands that waited for an update.
void EngineLoop::release_commands() {
  for (auto& command : std::exchange(after_update_, {})) post_quiet(std::move(command));
}

void EngineLoop::pause(PauseMode mode, Done done) {
  post_quiet({.mode = mode, .body = [this] { status_.is_paused = true; }, .done = std::move(done)});
}

// A pause that still waits for answers was asked for before.
void EngineLoop::resume(Done done) {
  post_quiet(
      {.body = [this] { status_.is_paused = false; }, .done = std::move(done), .in_order = true});
}

void EngineLoop::reset_prefix_cache(Done done) {
  post_quiet({.body = [this] { engine_.reset_prefix_cache(); }, .done = std::move(done)});
}

void EngineLoop::open_weights(WeightSource source, Done done) {
  const auto begin = [this, source] {
    require(!status_.is_sleeping, ErrorKind::kUsage, "the engine sleeps: wake it up first");
    opened_ = nullptr;
    engine_.begin_open_weights(source);
  };
  const auto end = [this, source] { opened_ = engine_.open_weights(source); };
  const auto begun = [this, end, done = std::move(done)](const std::optional<Error>& error) {
    if (error) return done(error);
    opening_ = QuietCommand{.body = end, .done = done};
  };
  post_quiet({.body = begin, .done = begun});
}

void EngineLoop::take_opened() {
  if (opening_ && (handed_over_ || !engine_.is_opening())) act(*std::exchange(opening_, {}));
}

void EngineLoop::load_weights(PauseMode mode, Done done) {
  post_quiet({.mode = mode, .body = [this] { load(); }, .done = std::move(done)});
}

void EngineLoop::load() {
  require(!status_.is_sleeping, ErrorKind::kUsage, "the engine sleeps: wake it up first");
  const auto load_all = std::exchange(opened_, nullptr);
  engine_.reset_prefix_cache();
  is_updating_ = true;
  lacked_weights_ = std::exchange(status_.lacks_weights, true);
  load_all();
}

void EngineLoop::end_update(bool succeeded, Done done) {
  post([this, succeeded, done = std::move(done)] {
    opened_ = nullptr;
    act({.body = [this, succeeded] { take_weights(succeeded); }, .done = done});
    is_updating_ = false;
    release_commands();
  });
}

void EngineLoop::take_weights(bool succeeded) {
  if (!is_updating_) return;
  if (succeeded) {
    ++status_.weight_version;
  } else if (!lacked_weights_) {
    engine_.open_weights({.are_previous = true})();
  } else {
    return;  // there is nothing to go back to
  }
  status_.lacks_weights = false;
}

void EngineLoop::sleep(int level, PauseMode mode, Done done) {
  const auto body = [this, level] {
    if (status_.is_sleeping && (level < 2 || status_.lacks_weights)) return;
    engine_.sleep(level);
    status_.is_sleeping = true;
    status_.lacks_weights = status_.lacks_weights || level == 2;
  };
  post_quiet({.mode = mode, .body = body, .done = std::move(done)});
}

void EngineLoop::wake_up(Done done) {
  const auto body = [this] {
    engine_.wake_up();
    status_.is_sleeping = false;
  };
  post_quiet({.body = body, .done = std::move(done), .in_order = true});
}

}  // namespace ferry::serve
