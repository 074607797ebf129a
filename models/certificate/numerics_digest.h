// Everything besides weights and tokens that decides the bits of a model's results: the mode, the
// dtype, the device, the libraries, and the shapes that kernels are given. A trainer and a rollout
// that agree in all entries compute the same log-probabilities in kBitwise; the mesh, the batch and
// the chunks of a prompt are no part of it, since no bit depends on them.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "models/gpt_model.h"

namespace ferry::models {

struct NumericsPolicy {
  std::vector<std::pair<std::string, std::string>> entries{};  // name, value

  // A hash of all entries, 32 hexadecimal digits.
  std::string digest() const;
  bool operator==(const NumericsPolicy&) const = default;
};

// Libraries and hardware that bits may depend on.
std::vector<std::pair<std::string, std::string>> numerics_environment(at::Device device);

NumericsPolicy numerics_policy(const GPTModel& model);

// Throws Error(kUsage) naming the first entry that differs, where the trainer is in kBitwise.
void require_same_numerics(const NumericsPolicy& trainer, const NumericsPolicy& rollout);

}  // namespace ferry::models
