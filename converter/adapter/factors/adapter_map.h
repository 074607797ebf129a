// The factors of a LoRA adapter beside the parameters of its base: which box of a factor that PEFT
// names is which box of one that Megatron-Bridge names. It is a ModelMap, so that planner, layouts
// and formats are those of a model.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "converter/families/model_map.h"

namespace ferry::converter {

// A parameter of the base that is changed.
struct AdaptedParameter {
  static constexpr int kFused = -1;

  std::uint32_t megatron = 0;  // index into the base's map
  // kFused: one first factor for all that the parameter merges (megatron/bridge/peft/lora.py). Else
  // which of query, key and value, or of gate and up, has factors of its own (canonical_lora.py).
  int part = kFused;
  std::int64_t rank = 0;
  // Tensor parallel ranks that save a projection with factors of its own. Megatron-Bridge takes a
  // gate or an up projection for both, and saves the halves of the ranks' rows apart.
  std::int64_t tp = 1;
};

// PEFT's name of a tensor's factors without ".lora_A.weight": that of transformers' module.
std::string factor_prefix(const ModelMap& base, std::string_view hf_name);
// "base_model.model.model.layers.0.mlp.experts": of all experts of a layer.
std::string experts_prefix(const ModelMap& base, std::string_view hf_name);
// The same behind the name of the tensor's file, where vLLM and SGLang look for it.
std::string file_prefix(std::string_view hf_name);
// PEFT's name of a module that an adapter names as it likes: as transformers does, or as files do.
std::string peft_module(const ModelMap& base, std::string_view module);

// The tensors of Hugging Face that a parameter merges, in their order.
std::vector<std::uint32_t> merged_tensors(const MegatronTensor& tensor);

// "decoder.layers.3.mlp.linear_fc1.weight" -> "….linear_fc1.adapter.linear_in.weight"
std::string adapter_key(const std::string& key, std::string_view factor);
// "", "adapter_q." and so on.
std::string canonical_prefix(const MegatronTensor& tensor, int part);

// True where Megatron-Core has several parameters for one tensor of Hugging Face, as for the
// projections into a gated delta net: one of them stands for all, with the factors of the tensor.
bool is_part_of_tensor(const ModelMap& base, const MegatronTensor& of);
// Throws Error(kLayout) naming such a parameter: Megatron-Bridge has no factors of it.
void require_own_factors(const ModelMap& base, std::span<const AdaptedParameter> adapted);

// Throws Error(kLayout) naming a parameter whose adapters are not converted.
ModelMap make_adapter_map(const ModelMap& base, std::span<const AdaptedParameter> adapted);

}  // namespace ferry::converter
