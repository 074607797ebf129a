#include "trainer/run/tracking_sink.h"

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"

namespace ferry::trainer {
namespace {

namespace fs = std::filesystem;
using std::chrono::steady_clock;

constexpr const char kProgram[] =
#include "trainer/run/tracking_sink.inc"
    ;
constexpr auto kPatience = std::chrono::minutes(2);

std::string name_of(const TrainerConfig& run) {
  if (!run.experiment_name.empty()) return run.experiment_name;
  const auto folder = fs::absolute(run.default_local_dir).lexically_normal();
  return (folder.has_filename() ? folder : folder.parent_path()).filename().string();
}

std::vector<std::string> command_of(const std::string& which,
                                    const TrainerConfig& run,
                                    std::int64_t step) {
  const fs::path folder = run.default_local_dir;
  if (step == 0) fs::remove(folder / (which + ".json"));
  const char* python = std::getenv("FERRY_PYTHON");
  return {python != nullptr && *python != '\0' ? python : "python3",
          "-c",
          kProgram,
          which,
          folder.string(),
          run.project_name,
          name_of(run)};
}

}  // namespace

TrackingSink::TrackingSink(std::string which, const TrainerConfig& run, std::int64_t step)
    : which_(std::move(which)), program_(command_of(which_, run, step)) {
  std::string_view nothing;
  const auto deadline = steady_clock::now() + kPatience;
  while (steady_clock::now() < deadline && !program_.ended()) {
    const auto line = program_.exchange(nothing, std::chrono::milliseconds(100));
    if (line == "ready") return;
  }
  throw Error(ErrorKind::kUsage,
              fmt::format("trainer.logger: {} did not begin: {}", which_,
                          program_.ended().value_or("no answer in two minutes")),
              "FERRY_PYTHON names a Python that has it; its own words are above");
}

std::string TrackingSink::finish() {
  program_.close_input();
  std::string_view nothing;
  const auto deadline = steady_clock::now() + kPatience;
  while (steady_clock::now() < deadline && !program_.ended())
    program_.exchange(nothing, std::chrono::milliseconds(100));
  if (program_.ended() == "exit status 0") return "";
  return fmt::format("trainer.logger: {} lacks a part of the metrics: {}", which_,
                     program_.ended().value_or("not done after two minutes"));
}

}  // namespace ferry::trainer
