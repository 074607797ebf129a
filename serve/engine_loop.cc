#include "serve/engine_loop.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "distckpt/base/foreign_error.h"

namespace ferry::serve {

using rollout::RequestOutput;

namespace {

constexpr std::chrono::seconds kIdle{5};

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
      arrived_.wait_for(lock, kIdle, [&] { return stopping_ || !commands_.empty() || has_work(); });
      if (stopping_) return;
      commands.swap(commands_);
    }
    if (commands.empty() && !has_work()) idle();
    for (const auto& command : commands) command();
    finish_draining();
    if (may_step() && engine_.has_unfinished()) step();
    if (!commands.empty() || !to_report_.empty()) report(std::exchange(to_report_, {}));
  }
}

bool EngineLoop::may_step() const {
  return !status_.is_paused && !status_.is_sleeping && !status_.lacks_weights && !handed_over_;
}

bool EngineLoop::has_work() const {
  return (may_step() && engine_.has_unfinished()) ||
         (!after_draining_.empty() && under_way_.empty());
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

void EngineLoop::fail(const Error& error) {
  if (!hand_over(error)) abort_all(error);
}

// Returns whether somebody else answers the requests.
bool EngineLoop::hand_over(const Error& error) {
  if (handed_over_) return true;
  if (!on_failure_ || !on_failure_(error)) return false;
  handed_over_ = error;
  for (const auto& id : std::exchange(under_way_, {})) engine_.abort(id);
  held_.clear();
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
  while (!after_draining_.empty() && under_way_.empty()) {
    const auto command = std::move(after_draining_.front());
    after_draining_.pop_front();
    command();
  }
  if (!may_step() || !after_draining_.empty()) return;
  for (auto& request : std::exchange(held_, {})) admit(std::move(request));
}

// Runs `body` when requests under way are dealt with as `mode` says.
void EngineLoop::post_quiet(PauseMode mode, std::function<void()> body, Done done) {
  post([this, mode, body = std::move(body), done = std::move(done)] {
    const auto act = [this, body, done] {
      if (handed_over_) return done(handed_over_);
      const auto error = attempt(body);
      if (error && engine_.is_lost()) fail(*error);
      report(std::exchange(to_report_, {}));
      done(error);
    };
    if (mode == PauseMode::kAbort) abort_all(std::nullopt);
    // If no step may run, nothing under way can finish: it is kept.
    if (mode == PauseMode::kWait && may_step() && !under_way_.empty()) {
      after_draining_.emplace_back(act);
    } else {
      act();
    }
  });
}

void EngineLoop::pause(PauseMode mode, Done done) {
  post_quiet(
      mode, [this] { status_.is_paused = true; }, std::move(done));
}

void EngineLoop::resume(Done done) {
  post_quiet(
      PauseMode::kKeep, [this] { status_.is_paused = false; }, std::move(done));
}

void EngineLoop::reset_prefix_cache(Done done) {
  post_quiet(
      PauseMode::kKeep, [this] { engine_.reset_prefix_cache(); }, std::move(done));
}

void EngineLoop::update_weights(WeightSource source, PauseMode mode, Done done) {
  post_quiet(
      mode, [this, source = std::move(source)] { load(source); }, std::move(done));
}

void EngineLoop::load(const WeightSource& source) {
  require(!status_.is_sleeping, ErrorKind::kUsage, "the engine sleeps: wake it up first");
  const auto load_all = engine_.open_weights(source);
  engine_.reset_prefix_cache();
  status_.lacks_weights = true;  // until all have come
  load_all();
  status_.lacks_weights = false;
  ++status_.weight_version;
}

void EngineLoop::sleep(int level, PauseMode mode, Done done) {
  const auto body = [this, level] {
    if (status_.is_sleeping) return;
    engine_.sleep(level);
    status_.is_sleeping = true;
    status_.lacks_weights = status_.lacks_weights || level == 2;
  };
  post_quiet(mode, body, std::move(done));
}

void EngineLoop::wake_up(Done done) {
  const auto body = [this] {
    engine_.wake_up();
    status_.is_sleeping = false;
  };
  post_quiet(PauseMode::kKeep, body, std::move(done));
}

}  // namespace ferry::serve
