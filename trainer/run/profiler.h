// Profiles of some steps of some ranks (verl: global_profiler): Chrome traces of what host and GPU
// did, or ranges for a run under Nsight Systems (nsys profile -c cudaProfilerApi ...).
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <string>

#include "trainer/config/run_sections.h"

namespace ferry::trainer {

class StepProfiler {
 public:
  StepProfiler(const GlobalProfilerConfig& global, const ProfilerConfig& role, int rank);
  ~StepProfiler();  // a profile that is under way is kept
  StepProfiler(const StepProfiler&) = delete;
  StepProfiler& operator=(const StepProfiler&) = delete;

  void begin_step(std::int64_t step);
  void end_step(std::int64_t step);
  // A part of a step, with `discrete` a profile of its own.
  void begin_task(std::int64_t step, const std::string& task);
  void end_task();

 private:
  void start(std::string name);
  void stop();

  std::optional<ProfilerTool> tool_;  // none: this rank is not profiled
  std::set<std::int64_t> steps_;
  bool continuous_;
  bool discrete_;
  std::filesystem::path folder_;
  int rank_;
  std::string running_;  // the name of the profile under way
};

}  // namespace ferry::trainer
