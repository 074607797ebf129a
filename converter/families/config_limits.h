// Limits of the sizes of a configuration. A few bytes of it say how many tensors a model
// has: none of them may ask for more memory than a machine has.
#pragma once

#include <cstdint>
#include <string_view>

#include "distckpt/base/error.h"
#include "models/spec/transformer_config.h"

namespace ferry::converter {

inline constexpr std::int64_t kMaxSize = std::int64_t{1} << 31;
inline constexpr std::int64_t kMaxLayers = 1 << 16;
inline constexpr std::int64_t kMaxHeads = 1 << 16;
inline constexpr std::int64_t kMaxExperts = 1 << 16;
inline constexpr std::int64_t kMaxExpertsOfAllLayers = 1 << 17;  // Kimi K2 has 23,424

// Throws Error(kCorrupt) `SOURCE: 65536 layers of 65536 experts ...`.
inline void require_moderate(const models::TransformerConfig& config, std::string_view source) {
  const auto layers = config.num_layers + config.mtp_num_layers;
  require(config.num_moe_experts * layers <= kMaxExpertsOfAllLayers, ErrorKind::kCorrupt,
          "{}: {} layers of {} experts are more than the {} experts that are handled", source,
          layers, config.num_moe_experts, kMaxExpertsOfAllLayers);
}

}  // namespace ferry::converter
