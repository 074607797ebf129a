// Adapters as PEFT saves them, written by hand.
#pragma once

#include <cstdint>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "converter/adapter/factors/lora_settings.h"
#include "tests/support/safetensors_file.h"

namespace ferry::converter::peft_files {

struct Factors {
  std::string module{};        // "model.layers.0.self_attn.q_proj"
  std::vector<float> right{};  // lora_A: [rank, columns]
  std::vector<float> left{};   // lora_B: [rows, rank]
  std::int64_t rank = 0;
};

// `more`: of adapter_config.json, from a comma on.
inline void write_files(const std::filesystem::path& folder,
                        const std::vector<support::StoredTensor>& tensors,
                        std::int64_t rank,
                        const std::string& more = "") {
  std::filesystem::create_directories(folder);
  distckpt::write_text(
      folder / kAdapterConfig,
      fmt::format(R"({{"peft_type": "LORA", "r": {}, "lora_alpha": {}{}}})", rank, 2 * rank, more));
  support::write_safetensors(folder / kAdapterWeights, tensors);
}

inline std::vector<support::StoredTensor> tensors_of(const std::vector<Factors>& all) {
  std::vector<support::StoredTensor> tensors;
  for (const auto& factors : all) {
    const auto add = [&](const char* part, const std::vector<float>& values, std::int64_t rows) {
      tensors.push_back(
          support::stored_tensor(fmt::format("{}{}.{}.weight", kPeftPrefix, factors.module, part),
                                 {rows, std::ssize(values) / rows}, values));
    };
    add("lora_A", factors.right, factors.rank);
    add("lora_B", factors.left, std::ssize(factors.left) / factors.rank);
  }
  return tensors;
}

inline void write_peft(const std::filesystem::path& folder,
                       const std::vector<Factors>& all,
                       const std::string& more = "") {
  write_files(folder, tensors_of(all), all.front().rank, more);
}

// Small integers: products and sums of them are exact in fp32.
inline std::vector<float> small_integers(std::int64_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> values;
  for (std::int64_t i = 0; i < count; ++i)
    values.push_back(static_cast<float>(static_cast<int>(random() % 7) - 3));
  return values;
}

// Factors of rank 2 of a module of so many rows and columns.
inline Factors random_factors(const std::string& module,
                              std::int64_t rows,
                              std::int64_t columns,
                              std::uint64_t seed) {
  return {.module = module,
          .right = small_integers(2 * columns, seed),
          .left = small_integers(2 * rows, seed + 1),
          .rank = 2};
}

}  // namespace ferry::converter::peft_files
