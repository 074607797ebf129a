#include "trainer/run/profiler.h"

#include <fmt/format.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <utility>

#include "models/device/device.h"

namespace ferry::trainer {
namespace {

namespace kineto = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;
using torch::profiler::impl::ProfilerState;

bool is_profiled(const ProfilerConfig& role, int rank) {
  return role.enable && (role.all_ranks || std::ranges::find(role.ranks, rank) != role.ranks.end());
}

}  // namespace

StepProfiler::StepProfiler(const GlobalProfilerConfig& global, const ProfilerConfig& role, int rank)
    : tool_(is_profiled(role, rank) ? global.tool : std::nullopt),
      steps_(global.steps.begin(), global.steps.end()),
      continuous_(global.profile_continuous_steps),
      discrete_(global.discrete),
      folder_(global.save_path),
      rank_(rank) {}

StepProfiler::~StepProfiler() {
  try {
    stop();
  } catch (const std::exception&) {  // whatever ends the run matters more
  }
}

void StepProfiler::begin_step(std::int64_t step) {
  if (!tool_ || discrete_ || !steps_.contains(step) || !running_.empty()) return;
  start(fmt::format("step_{}", step));
}

void StepProfiler::end_step(std::int64_t step) {
  if (continuous_ && steps_.contains(step + 1)) return;
  stop();
}

void StepProfiler::begin_task(std::int64_t step, const std::string& task) {
  if (!tool_ || !discrete_ || !steps_.contains(step)) return;
  start(fmt::format("step_{}_{}", step, task));
}

void StepProfiler::end_task() {
  if (discrete_) stop();
}

void StepProfiler::start(std::string name) {
  running_ = std::move(name);
  if (tool_ == ProfilerTool::kNsys) {
    models::start_cuda_profiler();
    kineto::enableProfiler(kineto::ProfilerConfig(ProfilerState::NVTX), {});
    return;
  }
  const std::set<ActivityType> activities{ActivityType::CPU, ActivityType::CUDA};
  const kineto::ProfilerConfig config(ProfilerState::KINETO);
  kineto::prepareProfiler(config, activities);
  kineto::enableProfiler(config, activities);
}

void StepProfiler::stop() {
  if (running_.empty()) return;
  const auto name = std::exchange(running_, "");
  const auto profile = kineto::disableProfiler();
  if (tool_ == ProfilerTool::kNsys) {
    models::stop_cuda_profiler();
    return;
  }
  std::filesystem::create_directories(folder_);
  profile->save((folder_ / fmt::format("{}_rank_{}.json", name, rank_)).string());
}

}  // namespace ferry::trainer
