// Copies the metrics of a JSONL file into an event file: what
// tests/interop/train/test_metric_logs.py reads.
//   metric_tool METRICS.jsonl FOLDER FIRST_STEP
#include <cstdio>
#include <string>

#include "distckpt/base/error.h"
#include "trainer/metrics/metric_log.h"
#include "trainer/metrics/run_log.h"

int main(int argc, char** argv) {
  using namespace ferry;
  if (argc != 4) return 2;
  try {
    const auto first_step = std::stoll(argv[3]);
    const auto log = trainer::open_event_log(argv[2], first_step);
    for (const auto& step : trainer::read_metrics(argv[1]).steps) {
      if (step.step >= first_step) log->write(step);
    }
    return 0;
  } catch (const Error& error) {
    fmt::print(stderr, "{}", error.report());
    return 2;
  }
}
