// A LoRA adapter in a checkpoint that may hold a model, too, as verl's trainers save it: in FSDP's
// files of ranks tensors have PEFT's names, the base's and the factors; torch_dist has the factors
// of Megatron-Bridge. lora_train_meta.json says the adapter's alpha.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "converter/stored/locate.h"

namespace ferry::converter {

inline constexpr std::string_view kPeftPrefix = "base_model.model.";
inline constexpr std::string_view kVerlLoraRecord = "lora_train_meta.json";

// "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight" is one.
bool is_lora_factor(std::string_view name);

// The same of a key of Megatron-Bridge: "decoder.layers.mlp.linear_fc2.adapter.linear_in.weight".
bool is_adapter_key(std::string_view key);

// The base's name of a tensor that is none: "base_model.model.lm_head.base_layer.weight" is
// "lm_head.weight". A name that is not PEFT's stays as it is. Throws Error(kLayout) for a tensor of
// a module that was trained whole (modules_to_save).
std::string name_in_base(std::string_view name, const std::string& source);

// Throws Error(kUsage): the model was to be read, and there is only an adapter, or an adapter
// beside it that would be lost.
[[noreturn]] void refuse_adapter(const Location& location, bool alone);

// Settings of the adapter of a checkpoint, as far as they are said.
struct LoraRecord {
  std::string source{};                // its path, for messages
  std::optional<std::int64_t> rank{};  // verl writes 0 for one that it does not know
  std::optional<double> alpha{};       // likewise
  std::string task_type = "CAUSAL_LM";
};

// lora_train_meta.json beside the files; of a dist_ckpt/ also beside model/, or beside dist_ckpt/
// itself. Nothing if there is none. Throws Error(kCorrupt) for one that is not understood.
std::optional<LoraRecord> find_lora_record(const Location& location);

}  // namespace ferry::converter
