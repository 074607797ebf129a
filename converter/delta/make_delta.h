// Makes a delta of two checkpoints, in any formats and layouts: both are read once, side by side,
// in bounded memory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "converter/checkpoint_pair.h"
#include "converter/delta/delta_manifest.h"
#include "converter/progress.h"

namespace ferry::converter {

enum class DeltaTarget {
  kFerry,
  kSlime,  // a version in slime's folder of versions
  kVllm,   // sparse patches in the coordinates of vLLM's CheckpointWeightPatch: written, not read
};

struct MakeDeltaOptions {
  PairOptions ends{};          // left: the base, right: the result. All of it
  std::filesystem::path to{};  // the folder that is made; of kSlime the folder of versions
  DeltaTarget form = DeltaTarget::kFerry;
  std::optional<std::int64_t>
      version{};  // of kSlime. Default: the one behind the last that is there
};

struct MakeDeltaReport {
  std::filesystem::path base{};
  std::filesystem::path result{};
  std::filesystem::path target{};
  std::string base_digest{};  // of the models
  std::string result_digest{};
  std::int64_t num_tensors = 0;
  std::int64_t num_changed_tensors = 0;
  std::int64_t num_elements = 0;
  std::int64_t num_changed = 0;      // elements
  std::int64_t model_bytes = 0;      // of one end
  std::int64_t stored_bytes = 0;     // of the delta's files
  std::vector<std::string> files{};  // that travel along, differ, and are in the delta
  std::vector<std::string> notes{};
  double seconds = 0;
};

// Publishes the delta atomically, or nothing. Throws Error(kLayout) naming a tensor that only one
// end has or that differs in shape or dtype, and Error(kUsage) if something is at the target.
MakeDeltaReport make_delta(const MakeDeltaOptions& options, const ProgressFunction& progress = {});

}  // namespace ferry::converter
