// Tensors in memory as a checkpoint: a source of conversions like any other.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "converter/open/checkpoint.h"

namespace ferry::converter {

// A tensor in Hugging Face terms, row-major on the host. The owner keeps it alive for as long as a
// Checkpoint names it.
struct NamedMemory {
  std::string name{};
  distckpt::DType dtype = distckpt::DType::kBF16;
  distckpt::Shape shape{};
  std::byte* data = nullptr;  // only read
};

// A checkpoint of the model that `like` describes, with these tensors in the place of its own, and
// with its config.json and tokenizer. Throws Error(kLayout) naming a tensor that is missing,
// surplus or of another shape, and Error(kUsage) if `like` has no config.json.
Checkpoint checkpoint_in_memory(const Checkpoint& like, const std::vector<NamedMemory>& tensors);

// Makes config.json say the dtype of the model's tensors where that is not the origin's. The
// headers of the origin's files go unless they list what the model has, as it has it.
void adapt_form(const Checkpoint& origin, const Checkpoint& model, HfForm& form);

}  // namespace ferry::converter
