// A LoRA adapter that lies somewhere, as PEFT, verl, ms-swift or Megatron-Bridge saved it, opened
// as a source of a plan: its factors are tensors under PEFT's names.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "converter/adapter/expert_factors.h"
#include "converter/open/checkpoint.h"

namespace ferry::converter {

enum class AdapterForm {
  kPeft,      // a folder with adapter_config.json and adapter_model.safetensors
  kVerl,      // that folder as lora_adapter in a checkpoint of verl (verl/model_merger), or the
              // factors in its files of FSDP by rank
  kMegatron,  // a torch_dist checkpoint of Megatron-Bridge, run_config.yaml in it
  kVllm,      // PEFT's files as vLLM and SGLang read them: expert by expert. Opened as kPeft
};
std::string_view form_name(AdapterForm form);  // "PEFT", "verl", "Megatron-Bridge", "vLLM, SGLang"
// "peft", "verl", "megatron", "vllm" or "sglang".
std::optional<AdapterForm> adapter_form(std::string_view name);

inline constexpr std::string_view kVerlAdapter = "lora_adapter";

// A linear layer of a vision tower, whose factors travel beside those of the map: PEFT's name
// without ".lora_A.weight", and the base's tensor.
struct AdaptedTowerModule {
  std::string prefix{};
  distckpt::ModelTensor tensor{};
  std::int64_t rank = 0;
  float scaling = 1;  // of the product
};

struct Adapter {
  AdapterForm form = AdapterForm::kPeft;
  bool canonical = false;   // factors of their own for query, key and value, and for gate and up
  Checkpoint checkpoint{};  // megatron_names, map and links are the adapter's; no `hf`
  std::vector<AdaptedParameter> adapted{};
  std::vector<float> scaling{};  // of the product, by `adapted`
  std::vector<AdaptedTowerModule> tower{};
  ExpertNames experts = ExpertNames::kTogether;  // as they were found
  std::string config{};  // PEFT's adapter_config.json; none of Megatron-Bridge, and by rank
  std::string task_type = "CAUSAL_LM";  // where there is none
};

struct OpenAdapterOptions {
  // The tensor parallel size of a target of Megatron-Bridge: fused where query, key and value share
  // their first factor, and gate and up likewise, else canonical as these many ranks save it.
  // Default: that form is not wanted.
  std::optional<int> megatron_tp{};
  // The largest rank for all where the factors of all products are equal: lower ones get zeros.
  bool one_rank = false;
  std::optional<double> alpha{};  // of an adapter of Megatron-Bridge or FSDP by rank; default: its
                                  // own, where a file beside it says that
};

// Throws Error(kLayout) if the layers of the model, which adapters change, are not known.
void require_adaptable(const Checkpoint& base);

// `base` is the checkpoint that the adapter changes. Throws Error(kLayout) naming a
// tensor that is missing, surplus or of another shape, and settings that are not converted.
Adapter open_adapter(const std::filesystem::path& path,
                     const Checkpoint& base,
                     const OpenAdapterOptions& options = {});

// The same of a torch_dist checkpoint; `base` is the map.
Adapter open_megatron_adapter(const Location& location,
                              const ModelMap& base,
                              const OpenAdapterOptions& options);

}  // namespace ferry::converter
