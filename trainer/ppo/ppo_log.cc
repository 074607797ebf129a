#include "trainer/ppo/ppo_log.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "models/device/device.h"
#include "trainer/engine/run_options.h"
#include "trainer/metrics/performance.h"
#include "trainer/ppo/ppo_metrics.h"
#include "trainer/workers/role.h"

namespace ferry::trainer {

PpoLog::PpoLog(const PpoConfig& config,
               const models::World& world,
               const models::TransformerConfig& actor,
               std::int64_t step,
               std::int64_t total_steps,
               std::function<void(const std::string&)> say)
    : config_(config),
      world_(world),
      actor_(actor),
      say_(std::move(say)),
      gpu_(find_device(models::device_name(world.device()))),
      record_(config.trainer.run, /*rank=*/0, step, total_steps, to_toml(config), say_) {
  if (config.rollout.agents.enabled())
    journal_ = std::make_unique<SessionJournal>(
        std::filesystem::path(config.trainer.run.default_local_dir) / kSessionFolder,
        first_logged_step(step));
}

PpoLog::~PpoLog() = default;

void PpoLog::phase(const char* name, const std::function<void()>& body) {
  const auto span = record_.timeline().span(name);
  body();
  models::synchronize(world_.device());
}

void PpoLog::add_spans(std::vector<Span> spans) {
  for (auto& span : spans) record_.timeline().add(std::move(span.name), span.start, span.end);
}

void PpoLog::begin_step(std::int64_t step) {
  step_ = step;
  started_ = steady_time();
  memory_ = {};
  metrics_ = {};
  record_.timeline().begin_step(step);
}

void PpoLog::add_update(const char* method, const UpdateOutput& output) {
  for (const auto& [name, value] : output.metrics) metrics_[name] = value;
  memory_.add(output.max_memory);
  if (!output.not_finite.empty())
    say_(fmt::format("step {}: {} skipped an update: the gradient of {} is not finite", step_,
                     method, output.not_finite));
}

void PpoLog::add_costs(const RolloutBatch& batch) {
  const auto counts = count_tokens(batch);
  const auto seconds = steady_time() - started_;
  auto timing = record_.timeline().end_step();
  timing["step"] = seconds;
  if (config_.is_async()) {
    metrics_["perf/trainer/idle_ratio"] = timing["gen"] / seconds;
    metrics_["perf/rollouter/idle_ratio"] =
        std::max(0.0, 1 - metrics_["perf/rollouter/busy_s"] / seconds);
  }
  const auto num_actor_ranks = num_ranks(config_.actor.ranks, world_.size());
  if (gpu_)
    metrics_.merge(mfu_metrics(batch, actor_,
                               {.seconds = timing,
                                .ppo_epochs = config_.actor.ppo_epochs,
                                .peak_flops = gpu_->flops * num_actor_ranks}));
  metrics_.merge(performance_metrics({.seconds = seconds,
                                      .tokens = counts.prompt + counts.response,
                                      .response_tokens = counts.response,
                                      .num_gpus = world_.size(),
                                      .max_memory_allocated = memory_.allocated,
                                      .max_memory_reserved = memory_.reserved,
                                      .cpu_memory_used = host_memory_used(),
                                      .timing = timing}));
}

void PpoLog::end_step(const RolloutBatch& batch) {
  add_costs(batch);
  metrics_["training/global_step"] = static_cast<double>(step_);
  write(step_, metrics_);
  record_.show(step_, metrics_);
}

void PpoLog::write_sessions(std::int64_t step, bool validates, const RolloutBatch& batch) const {
  if (journal_) journal_->write(step, validates, batch);
}

void PpoLog::time_save(const std::function<void()>& save) {
  phase("save_checkpoint", save);
  write(step_, {{"timing_s/save_checkpoint", record_.timeline().end_step().at("save_checkpoint")}});
}

}  // namespace ferry::trainer
