// Prompts and answers of a step, and the worth of these: <folder>/<step>.jsonl, a line an answer,
// as verl writes them (ray_trainer.py, _write_generations) for trainer.rollout_data_dir and
// trainer.validation_data_dir. A file is there whole or not at all.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

namespace ferry::trainer {

// Their folders in that of a run, unless it was told otherwise.
inline constexpr const char* kRolloutDataFolder = "rollouts";
inline constexpr const char* kValidationDataFolder = "validations";

// {"input": "2+2=", "output": "4", "gts": "4", "score": 1.0, "step": 12, "acc": 1.0}
struct LoggedSample {
  std::string input{};   // the prompt
  std::string output{};  // the response
  nlohmann::json gts{};  // the ground truth; null if there is none
  double score = 0;      // the sum over its tokens; null in the file if it is not finite
  std::map<std::string, nlohmann::json> extra{};  // what the reward said besides: more members
};

class SampleLog {
 public:
  // Creates the folder unless it is there. A run that goes on at `first_step` removes the files of
  // that step and after. Throws Error(kIo).
  SampleLog(std::filesystem::path folder, std::int64_t first_step);

  // Bytes that are no UTF-8 are replaced by U+FFFD. Throws Error(kIo); a file of that step is
  // replaced.
  void write(std::int64_t step, std::span<const LoggedSample> samples) const;

 private:
  std::filesystem::path folder_;
};

// Creates the folder unless it is there, and removes its files of that step and after, and those
// that a process which was killed left unfinished. Throws Error(kIo).
void forget_steps(const std::filesystem::path& folder, std::int64_t first_step);

// The files of a folder by their steps; none if there is no such folder.
std::map<std::int64_t, std::filesystem::path> sample_files(const std::filesystem::path& folder);

struct StepSamples {
  std::vector<LoggedSample> samples{};  // in the order of the file
  std::int64_t num_unreadable = 0;      // lines that are none
};

// Reads one file. A score that is null is NaN. Throws Error(kNotFound | kIo).
StepSamples read_samples(const std::filesystem::path& path);

}  // namespace ferry::trainer
