// The calls by which long work tells its caller where it is, and is told to stop.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "distckpt/execute/executor.h"

namespace ferry::converter {

struct Progress {
  std::string_view stage{};  // "copying", "proving", "comparing", "digesting"
  std::int64_t bytes_done = 0;
  std::int64_t bytes_total = 0;
  bool finished = false;
};

// Called several times a second, and once when the stage is finished. Returns false to stop.
using ProgressFunction = std::function<bool(const Progress&)>;

// Waits for an execution while it reports; a stage without a name does not. Throws
// Error(kCancelled) when told to stop.
distckpt::ExecuteReport wait_reporting(distckpt::Execution execution,
                                       std::string_view stage,
                                       const ProgressFunction& progress);

}  // namespace ferry::converter
