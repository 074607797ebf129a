// A LoRA adapter as PEFT saves it: adapter_config.json, and the two factors of each changed weight
// in adapter_model.safetensors.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "distckpt/elements/digest.h"
#include "distckpt/formats/safetensors.h"
#include "distckpt/storage/file_io.h"

namespace ferry::converter {

// A weight of the model that the adapter changes. Nothing of it is in memory.
struct AdaptedTensor {
  std::string tensor{};  // of the model: "model.layers.0.self_attn.q_proj.weight"
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t rank = 0;   // 0: the adapter only holds the base's weight
  float scaling = 1;       // of the product
  bool embedding = false;  // the factors are stored transposed
  distckpt::SafetensorsEntry a{};
  distckpt::SafetensorsEntry b{};
  std::optional<distckpt::SafetensorsEntry> magnitude{};  // of DoRA
  // The base's weight, which PEFT saves beside the factors of an embedding.
  std::optional<distckpt::SafetensorsEntry> base{};
};

// W becomes W + scaling * left right; with magnitudes each row is then scaled to that length.
struct LowRankChange {
  std::vector<float> left{};       // [rows, rank]
  std::vector<float> right{};      // [rank, columns]
  std::vector<float> magnitude{};  // [rows], or none
};

class PeftAdapter {
 public:
  // Reads configuration and headers. Throws Error(kLayout) for a kind of adapter that is not merged
  // (weights that are saved whole, biases, fan_in_fan_out), naming the setting, and Error(kCorrupt)
  // for factors that do not fit together.
  explicit PeftAdapter(const std::filesystem::path& folder);

  const std::filesystem::path& folder() const { return folder_; }
  const std::vector<AdaptedTensor>& tensors() const { return tensors_; }
  const distckpt::Digest& identity() const { return identity_; }

  // Reads the factors, as fp32. Thread-safe.
  LowRankChange load(const AdaptedTensor& tensor) const;

  // Elements [first, first + count) of tensor.base, as fp32. Thread-safe.
  std::vector<float> base_elements(const AdaptedTensor& tensor,
                                   std::int64_t first,
                                   std::int64_t count) const;

  void require_unchanged() const { weights_.require_unchanged(); }

 private:
  std::vector<float> read(const distckpt::SafetensorsEntry& entry) const;
  std::vector<float> read(const distckpt::SafetensorsEntry& entry,
                          std::int64_t first,
                          std::int64_t count) const;

  std::filesystem::path folder_;
  distckpt::ReadFile weights_;
  std::vector<AdaptedTensor> tensors_;
  distckpt::Digest identity_{};
};

}  // namespace ferry::converter
