// The tensors of an adapter under PEFT's names, and its settings, as PEFT saved them in a folder or
// verl by rank.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "converter/adapter/factors/lora_settings.h"
#include "converter/families/model_map.h"
#include "converter/open/formats.h"

namespace ferry::converter {

struct PeftTensors {
  LoraSettings settings;
  std::string source{};  // for messages
  std::string config{};  // of PEFT, if there is one
  std::string task_type = "CAUSAL_LM";
  Location location{};
  distckpt::Layout layout{};
  std::vector<Replica> replicas{};
  std::vector<distckpt::ExpectedChecksum> checksums{};
};

// A folder with kAdapterConfig and kAdapterWeights.
PeftTensors read_peft(const std::filesystem::path& folder);

// verl's files of FSDP by rank; `alpha` takes the place of what a file beside them says. Throws
// Error(kLayout) for tensors that are no factors.
PeftTensors read_ranks(const Location& location,
                       const ModelMap& base,
                       const std::optional<double>& alpha);

}  // namespace ferry::converter
