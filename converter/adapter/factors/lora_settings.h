// The names and settings of a LoRA adapter as PEFT saves it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "converter/stored/verl_lora.h"
#include "distckpt/base/json.h"

namespace ferry::converter {

inline constexpr std::string_view kAdapterConfig = "adapter_config.json";
inline constexpr std::string_view kAdapterWeights = "adapter_model.safetensors";

// Rows of an embedding that were trained whole, as a part of it.
inline constexpr std::string_view kTokenRows = "trainable_tokens_delta";

// "model.layers.0.self_attn.q_proj", and which of its parts a name of the file is: "lora_A". A
// tensor that is saved whole (modules_to_save) is a module without parts: "lm_head.weight".
struct AdapterKey {
  std::string module{};
  std::string part{};

  bool is_factor() const { return part == "lora_A" || part == "lora_B"; }
};

// The folder's kAdapterWeights. Throws Error(kLayout) where it has them in another form.
std::filesystem::path adapter_weights(const std::filesystem::path& folder);

// The factor of the product: alpha / divisor. Throws Error(kCorrupt) unless both it and alpha are
// positive and finite.
float lora_scaling(double alpha, double divisor, const std::string& source);

// The settings of a LoraConfig that say how large a change is.
class LoraSettings {
 public:
  // Throws Error(kLayout) for a kind of adapter that is neither merged nor converted, naming the
  // setting.
  explicit LoraSettings(const std::filesystem::path& path);
  // The text of such a file; `source` is for messages.
  LoraSettings(std::string text, std::string source);

  const std::string& text() const { return text_; }  // of the file

  // Throws Error(kLayout) where it is set.
  void refuse(const std::string& key) const;

  bool uses_dora() const { return is_set("use_dora"); }
  // The embedding and an output layer that is tied to it are changed alike.
  bool ties_weights() const { return is_set("ensure_weight_tying"); }

  // Also of ms-swift's names, which end in ".default.weight". Throws Error(kLayout) for a name that
  // is no part of LoRA, unless modules are saved whole.
  AdapterKey parse_key(std::string_view name, const std::string& source) const;
  const std::vector<std::string>& target_parameters() const { return target_parameters_; }
  // The rows of an embedding whose values the adapter has. Throws Error(kCorrupt).
  std::vector<std::int64_t> token_indices(const std::string& module) const;

  // The factor of the product (peft/tuners/lora/layer.py, update_layer) of a module, or of a
  // parameter of experts. Throws Error(kCorrupt) if the settings name another rank.
  float scaling(const std::string& module, std::int64_t rank) const;

 private:
  bool is_set(const std::string& key) const;
  double number(const std::string& key,
                const std::string& patterns,
                const std::string& module) const;
  double positive(const nlohmann::ordered_json& value, const std::string& key) const;

  std::string source_;
  std::string text_;
  nlohmann::ordered_json config_;
  std::vector<std::string> target_parameters_;
};

// True if a name is `end`, or ends in it behind a dot: how PEFT looks for what it adapts.
bool is_named(std::string_view name, std::string_view end);

}  // namespace ferry::converter
