#include "converter/progress.h"

#include <chrono>

namespace ferry::converter {

distckpt::ExecuteReport wait_reporting(distckpt::Execution execution,
                                       std::string_view stage,
                                       const ProgressFunction& progress) {
  while (!execution.wait_for(std::chrono::milliseconds(100))) {
    const bool go_on = !progress || stage.empty() ||
                       progress({.stage = stage,
                                 .bytes_done = execution.bytes_done(),
                                 .bytes_total = execution.bytes_total()});
    if (!go_on) execution.cancel();
  }
  auto report = execution.wait();
  const bool go_on = !progress || stage.empty() || report.bytes == 0 ||
                     progress({.stage = stage,
                               .bytes_done = report.bytes,
                               .bytes_total = report.bytes,
                               .finished = true});
  require(go_on, ErrorKind::kCancelled, "interrupted");  // nothing of it is published, though read
  return report;
}

}  // namespace ferry::converter
