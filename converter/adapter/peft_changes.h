// The changes of an adapter of PEFT, by the tensors of its file and its settings.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "converter/adapter/adapter_changes.h"

namespace ferry::converter {

// A tensor of an adapter that has to be another one, or its transpose.
struct TiedTensors {
  std::string tensor{};
  std::string other{};
  bool transposed = false;
};

struct PeftChanges {
  Checkpoint checkpoint{};  // its tensors are those of the file
  std::vector<AdaptedTensor> tensors{};
  std::vector<TiedTensors> tied{};
};

// Throws as AdapterChanges does. Reads no tensor.
PeftChanges read_peft_changes(const std::filesystem::path& folder, const Checkpoint& base);

// Factors of gate and up, or of down, of one expert.
struct ExpertFactors {
  std::string a{};
  std::string b{};
  std::int64_t rank = 0;
  float scaling = 1;
};

// Adds the changes of the tensors that a parameter of an expert is made of.
void add_expert_changes(const ModelMap& base,
                        const MegatronTensor& of,
                        const ExpertFactors& factors,
                        std::vector<AdaptedTensor>& tensors);

}  // namespace ferry::converter
