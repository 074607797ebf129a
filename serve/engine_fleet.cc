#include "serve/engine_fleet.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <functional>
#include <thread>
#include <utility>

namespace ferry::serve {
namespace {

constexpr std::size_t kBlock = 16;              // tokens of a prompt that are remembered together
constexpr std::size_t kMostBlocks = 1'000'000;  // of an engine
constexpr std::int64_t kTokensPerSample = 256;  // to compute, that a sample under way counts as

// The hashes of a prompt's beginnings, a block longer each.
std::vector<std::uint64_t> blocks_of(const std::vector<std::int64_t>& prompt) {
  std::vector<std::uint64_t> hashes;
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a, over tokens
  for (std::size_t i = 0; i < prompt.size(); ++i) {
    hash = (hash ^ static_cast<std::uint64_t>(prompt[i])) * 0x100000001b3;
    if ((i + 1) % kBlock == 0) hashes.push_back(hash);
  }
  return hashes;
}

}  // namespace

EngineFleet::EngineFleet(const std::vector<EngineSteps*>& engines) {
  for (std::size_t i = 0; i < engines.size(); ++i) {
    auto& engine = engines_.emplace_back();
    engine.loop = std::make_unique<EngineLoop>(*engines[i]);
    engine.loop->on_outputs(
        [this, i](std::vector<rollout::RequestOutput> outputs, const EngineStatus& status) {
          take(i, std::move(outputs), status);
        });
    if (engines.size() > 1)
      engine.loop->on_failure([this, i](const Error& error) { return move_requests(i, error); });
  }
}

EngineFleet::~EngineFleet() = default;

void EngineFleet::run() {
  std::mutex mutex;
  std::exception_ptr failed;
  const auto run_one = [&](EngineLoop& loop) {
    try {
      loop.run();
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!failed) failed = std::current_exception();
      stop();
    }
  };
  {
    std::vector<std::jthread> others;
    for (std::size_t i = 1; i < engines_.size(); ++i)
      others.emplace_back(run_one, std::ref(*engines_[i].loop));
    run_one(*engines_[0].loop);
  }
  if (failed) std::rethrow_exception(failed);
}

void EngineFleet::stop() {
  for (auto& engine : engines_) engine.loop->stop();
}

// The engine with the least to compute for this prompt beside what it has to do.
std::size_t EngineFleet::choose(const std::vector<std::int64_t>& prompt) {
  const auto blocks = blocks_of(prompt);
  const auto cost_of = [&](const Engine& engine) {
    const auto known = std::ranges::find_if(
        blocks, [&](auto block) { return !engine.prompt_blocks.contains(block); });
    const auto cached = (known - blocks.begin()) * static_cast<std::int64_t>(kBlock);
    return engine.num_samples * kTokensPerSample + std::ssize(prompt) - cached;
  };
  std::size_t best = engines_.size();
  std::int64_t least = 0;
  for (std::size_t i = 0; i < engines_.size(); ++i) {
    if (engines_[i].has_failed) continue;
    const auto cost = cost_of(engines_[i]);
    if (best < engines_.size() && cost >= least) continue;
    best = i;
    least = cost;
  }
  auto& engine = engines_[best];
  if (engine.prompt_blocks.size() > kMostBlocks) engine.prompt_blocks.clear();
  engine.prompt_blocks.insert(blocks.begin(), blocks.end());
  return best;
}

void EngineFleet::add_request(std::string request_id,
                              std::vector<std::int64_t> prompt_token_ids,
                              rollout::SamplingParams params,
                              ImageFiles images) {
  if (engines_.size() == 1)
    return engines_[0].loop->add_request(std::move(request_id), std::move(prompt_token_ids),
                                         std::move(params), std::move(images));
  const std::lock_guard lock(mutex_);
  const auto chosen = choose(prompt_token_ids);
  const auto n = static_cast<std::size_t>(params.n);
  engines_[chosen].num_samples += params.n;
  engines_[chosen].loop->add_request(request_id, prompt_token_ids, params, images);
  requests_[std::move(request_id)] = {.prompt = std::move(prompt_token_ids),
                                      .params = std::move(params),
                                      .images = std::move(images),
                                      .engine = chosen,
                                      .delivered = std::vector<std::size_t>(n),
                                      .to_drop = std::vector<std::size_t>(n),
                                      .is_over = std::vector<bool>(n)};
}

void EngineFleet::abort(std::string request_id) {
  if (engines_.size() == 1) return engines_[0].loop->abort(std::move(request_id));
  const std::lock_guard lock(mutex_);
  const auto found = requests_.find(request_id);
  if (found == requests_.end()) return;
  auto& engine = engines_[found->second.engine];
  engine.num_samples -= found->second.params.n;
  requests_.erase(found);
  engine.loop->abort(std::move(request_id));
}

void EngineFleet::abort(std::string request_id, std::int64_t index) {
  if (engines_.size() == 1) return engines_[0].loop->abort(std::move(request_id), index);
  const std::lock_guard lock(mutex_);
  const auto found = requests_.find(request_id);
  if (found == requests_.end()) return;
  auto& request = found->second;
  auto& engine = engines_[request.engine];
  engine.loop->abort(request_id, index);
  request.is_over[static_cast<std::size_t>(index)] = true;
  if (std::ranges::find(request.is_over, false) != request.is_over.end()) return;
  engine.num_samples -= request.params.n;
  requests_.erase(found);
}

void EngineFleet::take(std::size_t engine,
                       std::vector<rollout::RequestOutput> outputs,
                       const EngineStatus& status) {
  if (engines_.size() == 1) {
    {
      const std::lock_guard lock(mutex_);
      engines_[0].status = status;
    }
    return on_outputs_(engine, std::move(outputs), status);
  }
  const std::lock_guard delivery(delivery_);
  EngineStatus whole;
  {
    const std::lock_guard lock(mutex_);
    engines_[engine].status = status;
    std::erase_if(outputs, [&](rollout::RequestOutput& output) {
      const auto found = requests_.find(output.request_id);
      if (found == requests_.end() || found->second.engine != engine) return true;
      if (!comes_again(found->second, status)) {
        output = {.request_id = output.request_id,
                  .finished = true,
                  .error = Error(ErrorKind::kDevice,
                                 "the engine of this request failed, and the weights that drew "
                                 "its first tokens are gone",
                                 "ask again")};
        engines_[engine].loop->abort(output.request_id);
      }
      const bool is_empty = drop_delivered(found->second, output);
      if (!output.outputs.empty()) {
        auto& request = found->second;
        const auto first = request.weight_version.value_or(status.weight_version);
        request.has_other_weights = request.has_other_weights || first != status.weight_version;
        request.weight_version = first;
      }
      if (!output.finished) return is_empty;
      engines_[engine].num_samples -= found->second.params.n;
      requests_.erase(found);
      return false;
    });
    whole = whole_status();
  }
  on_outputs_(engine, std::move(outputs), whole);
}

// True if tokens that have been delivered, and are drawn again now, are the same.
bool EngineFleet::comes_again(const Request& request, const EngineStatus& status) {
  const bool is_again = std::ranges::any_of(request.to_drop, [](auto count) { return count > 0; });
  return !is_again ||
         (!request.has_other_weights && request.weight_version == status.weight_version);
}

// Returns whether nothing is left of the output.
bool EngineFleet::drop_delivered(Request& request, rollout::RequestOutput& output) const {
  std::erase_if(output.outputs, [&](rollout::CompletionOutput& sample) {
    const auto index = static_cast<std::size_t>(sample.index);
    if (request.is_over[index]) return true;
    auto& to_drop = request.to_drop[index];
    const auto dropped = std::min(to_drop, sample.tokens.size());
    to_drop -= dropped;
    sample.tokens.erase(sample.tokens.begin(),
                        sample.tokens.begin() + static_cast<std::ptrdiff_t>(dropped));
    request.delivered[index] += sample.tokens.size();
    request.is_over[index] = sample.finish_reason != rollout::FinishReason::kNone;
    return sample.tokens.empty() && !request.is_over[index];
  });
  return output.outputs.empty() && !output.error;
}

// Called when the engine failed. False if there is no other engine.
bool EngineFleet::move_requests(std::size_t engine, const Error& error) {
  const std::lock_guard lock(mutex_);
  const bool is_last = std::ranges::none_of(engines_, [&](const Engine& other) {
    return &other != &engines_[engine] && !other.has_failed;
  });
  if (is_last) return false;
  if (!std::exchange(engines_[engine].has_failed, true))
    std::fputs(
        fmt::format("{:<10} engine {} of {}: {}\n", "failed", engine, engines_.size(), error.what())
            .c_str(),
        stderr);
  engines_[engine].num_samples = 0;
  engines_[engine].status = {};
  for (auto& [id, request] : requests_) {
    if (request.engine != engine) continue;
    request.engine = choose(request.prompt);
    request.to_drop = request.delivered;
    auto& other = engines_[request.engine];
    other.num_samples += request.params.n;
    other.loop->add_request(id, request.prompt, request.params, request.images);
    for (std::size_t i = 0; i < request.is_over.size(); ++i)
      if (request.is_over[i]) other.loop->abort(id, static_cast<std::int64_t>(i));
  }
  return true;
}

std::vector<std::optional<EngineStatus>> EngineFleet::statuses() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::optional<EngineStatus>> statuses;
  for (const auto& engine : engines_)
    statuses.push_back(engine.has_failed ? std::nullopt : std::optional(engine.status));
  return statuses;
}

EngineStatus EngineFleet::whole_status() const {
  EngineStatus whole{.is_paused = true, .is_sleeping = true};
  for (const auto& engine : engines_) {
    if (engine.has_failed) continue;
    const auto& one = engine.status;
    whole.stats.num_blocks += one.stats.num_blocks;
    whole.stats.num_free_blocks += one.stats.num_free_blocks;
    whole.stats.num_waiting += one.stats.num_waiting;
    whole.stats.num_running += one.stats.num_running;
    whole.stats.num_preemptions += one.stats.num_preemptions;
    whole.stats.prompt_tokens += one.stats.prompt_tokens;
    whole.stats.cached_tokens += one.stats.cached_tokens;
    whole.stats.output_tokens += one.stats.output_tokens;
    whole.stats.steps += one.stats.steps;
    whole.num_held += one.num_held;
    whole.is_paused = whole.is_paused && one.is_paused;
    whole.is_sleeping = whole.is_sleeping && one.is_sleeping;
    whole.lacks_weights = whole.lacks_weights || one.lacks_weights;
    whole.weight_version = std::max(whole.weight_version, one.weight_version);
  }
  return whole;
}

void EngineFleet::for_all(const Done& done, const std::function<void(EngineLoop&, Done)>& command) {
  struct Progress {
    std::mutex mutex{};
    std::size_t left = 0;
    std::optional<Error> error{};
  };
  const auto progress = std::make_shared<Progress>();
  const auto one_done = [this, progress, done](std::size_t engine,
                                               const std::optional<Error>& error) {
    const bool is_left_out = [&] {
      const std::lock_guard lock(mutex_);
      return engines_[engine].has_failed;
    }();
    {
      const std::lock_guard lock(progress->mutex);
      if (error && !is_left_out && !progress->error) progress->error = error;
      if (--progress->left > 0) return;
    }
    done(progress->error);
  };
  const std::lock_guard lock(mutex_);
  std::vector<std::size_t> living;
  for (std::size_t i = 0; i < engines_.size(); ++i)
    if (!engines_[i].has_failed) living.push_back(i);
  progress->left = living.size();
  for (const auto i : living)
    command(*engines_[i].loop,
            [one_done, i](const std::optional<Error>& error) { one_done(i, error); });
}

void EngineFleet::pause(PauseMode mode, const Done& done) {
  for_all(done, [&](EngineLoop& loop, Done one) { loop.pause(mode, std::move(one)); });
}

void EngineFleet::resume(const Done& done) {
  for_all(done, [](EngineLoop& loop, Done one) { loop.resume(std::move(one)); });
}

// The engines' caches are empty, or will be.
void EngineFleet::forget_prompts() {
  const std::lock_guard lock(mutex_);
  for (auto& engine : engines_) engine.prompt_blocks.clear();
}

void EngineFleet::reset_prefix_cache(const Done& done) {
  forget_prompts();
  for_all(done, [](EngineLoop& loop, Done one) { loop.reset_prefix_cache(std::move(one)); });
}

void EngineFleet::update_weights(WeightSource source, PauseMode mode, Done done) {
  {
    const std::lock_guard lock(mutex_);
    updates_.push_back({std::move(source), mode, std::move(done)});
    if (updates_.size() > 1) return;
  }
  begin_update();
}

void EngineFleet::begin_update() {
  const auto update = [&] {
    const std::lock_guard lock(mutex_);
    return updates_.front();
  }();
  const auto when_loaded = [this](const std::optional<Error>& error) { end_update(error); };
  const auto when_opened = [this, mode = update.mode, when_loaded](const auto& error) {
    if (error) return end_update(error);
    for_all(when_loaded,
            [&](EngineLoop& loop, Done one) { loop.load_weights(mode, std::move(one)); });
  };
  for_all(when_opened,
          [&](EngineLoop& loop, Done one) { loop.open_weights(update.source, std::move(one)); });
}

void EngineFleet::end_update(const std::optional<Error>& error) {
  forget_prompts();
  const auto when_ended = [this, error](const std::optional<Error>& of_old_weights) {
    Done done;
    bool has_more = false;
    {
      const std::lock_guard lock(mutex_);
      done = std::move(updates_.front().done);
      updates_.pop_front();
      has_more = !updates_.empty();
    }
    done(error ? std::optional(update_error(*error, of_old_weights)) : std::nullopt);
    if (has_more) begin_update();
  };
  for_all(when_ended, [&](EngineLoop& loop, Done one) { loop.end_update(!error, std::move(one)); });
}

// Says which weights there are after an update that failed.
Error EngineFleet::update_error(const Error& error,
                                const std::optional<Error>& of_old_weights) const {
  const std::lock_guard lock(mutex_);
  std::string message = error.what();
  if (of_old_weights)
    message +=
        fmt::format("; nor could the weights of before be loaded: {}", of_old_weights->what());
  message += whole_status().lacks_weights ? "; requests wait for an update that succeeds"
                                          : "; the weights are those of before";
  return {error.kind(), message, error.hint()};
}

void EngineFleet::sleep(int level, PauseMode mode, const Done& done) {
  forget_prompts();
  for_all(done, [&](EngineLoop& loop, Done one) { loop.sleep(level, mode, std::move(one)); });
}

void EngineFleet::wake_up(const Done& done) {
  for_all(done, [](EngineLoop& loop, Done one) { loop.wake_up(std::move(one)); });
}

}  // namespace ferry::serve
