// Rotary position embeddings with the roundings of Hugging Face (modeling_rope_utils.py and the
// families' apply_rotary_pos_emb).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "models/spec/transformer_config.h"

namespace ferry::models {

// The pairs of channels that turn together, and the rounding.
enum class RotaryStyle : std::uint8_t {
  kHalves,      // channel i with i + dim/2; each product rounded
  kInterleave,  // channel 2i with 2i + 1, which come out as halves (DeepSeek-V3)
  kComplex,     // channel 2i with 2i + 1, which stay there; in fp32, rounded once (DeepSeek-V2)
  kNeighbours,  // channel 2i with 2i + 1, which stay there, in the dtype of the angles (GLM-4,
                // ERNIE)
};

// The angles of one batch.
struct RotaryAngles {
  RotaryStyle style = RotaryStyle::kHalves;
  at::Tensor cos{};  // [tokens, 1, dim], of the model's dtype; in fp32 with rotary_in_fp32
  at::Tensor sin{};
  at::Tensor complex{};  // [tokens, 1, dim/2], of kComplex

  bool are_of(at::ScalarType dtype) const { return cos.defined() && cos.scalar_type() == dtype; }
};

class RotaryEmbedding {
 public:
  // Throws Error(kLayout) for a kind of scaling that is not known.
  RotaryEmbedding(const TransformerConfig& config, at::Device device);

  // positions [tokens], int64, or [3, tokens] in time, height and width where the configuration has
  // mrope_section.
  RotaryAngles angles(const at::Tensor& positions, at::ScalarType dtype) const;

  const at::Tensor& inv_freq() const { return inv_freq_; }  // [dim/2], fp32

 private:
  RotaryStyle style_;
  bool in_fp32_ = false;  // angles stay in fp32, and heads turn in it
  at::Tensor inv_freq_;
  at::Tensor axes_;  // [dim/2], int64: the position that turns a frequency; undefined: there is one
  double attention_scaling_ = 1.0;
};

// The meaning of one batch's positions to attention.
struct PositionAngles {
  RotaryAngles angles{};
  RotaryAngles local{};      // of layers that turns_locally() names
  at::Tensor query_scale{};  // [tokens, 1, 1], of the model's dtype; undefined: 1

  const RotaryAngles& of(bool locally) const { return locally ? local : angles; }
};

// The rotary embeddings of all layers.
class PositionEmbedding {
 public:
  // Throws Error(kLayout) for a kind of scaling that is not known.
  PositionEmbedding(const TransformerConfig& config, at::Device device);

  // positions [tokens], int64; lengths [tokens], int64, of the sequence of each. Undefined: none is
  // longer than TransformerConfig::max_generated_positions().
  PositionAngles angles(const at::Tensor& positions,
                        at::ScalarType dtype,
                        const at::Tensor& lengths = {}) const;

 private:
  RotaryEmbedding rotary_;
  std::optional<RotaryEmbedding> longer_;  // of kLongrope, of sequences beyond scaling_length_
  std::optional<RotaryEmbedding> local_;
  double scaling_beta_ = 0;          // of queries
  std::int64_t scaling_length_ = 0;  // original_max_position_embeddings
};

// x [tokens, heads, channels] -> like x, whose first dim channels have turned. Differentiable.
at::Tensor apply_rotary(const at::Tensor& x, const RotaryAngles& angles);

// The factor by which attention multiplies the products of queries and keys.
double softmax_scale(const TransformerConfig& config);

}  // namespace ferry::models
