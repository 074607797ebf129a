// Results of another program from the same weights, in a safetensors file as tests/interop's
// hf_reference.py writes it. It holds for each sequence i `tokens.i` and `logits.i`, and optionally
// `hidden.i.MODULE` under Megatron's names of modules and `predicted.i.mtp.layers.K`, the logits of
// a prediction layer; the metadata says how they were computed.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace ferry::converter {

struct ReferenceSequence {
  at::Tensor tokens{};                            // [tokens], int64
  at::Tensor logits{};                            // [tokens, vocab] or [tokens, num_labels]
  std::map<std::string, at::Tensor> hidden{};     // by module: [tokens, hidden]
  std::map<std::string, at::Tensor> predicted{};  // by prediction layer: [tokens, vocab]
};

struct Reference {
  std::string regime{};  // JSON: versions, dtype, device, attention
  std::vector<ReferenceSequence> sequences{};
  std::map<std::string, at::Tensor> others{};  // what else the file holds, by name
};

// Throws Error(kCorrupt | kNotFound) naming the file and what is wrong with it.
Reference read_reference(const std::filesystem::path& path);

}  // namespace ferry::converter
