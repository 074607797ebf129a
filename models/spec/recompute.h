// The activations that a backward pass computes again instead of keeping them (Megatron-Core's
// recompute_* settings).
#pragma once

#include <cstdint>

namespace ferry::models {

struct Recompute {
  enum class Granularity : std::uint8_t {
    kNone,
    kSelective,  // `modules` of each layer
    kFull,       // whole layers
  };
  struct Modules {
    bool core_attn = false;  // from queries, keys and values on
    bool mlp = false;        // of layers without experts
    bool moe = false;        // of layers with experts
    bool moe_act = false;    // the activations of experts alone, between their two products

    bool operator==(const Modules&) const = default;
  };
  enum class Method : std::uint8_t {
    kUniform,  // all layers, num_layers at a time: one input is kept for each such group
    kBlock,    // the first num_layers of each chunk of a stage, one at a time
  };
  Granularity granularity = Granularity::kNone;
  Modules modules{};                 // of kSelective
  Method method = Method::kUniform;  // of kFull
  std::int64_t num_layers = 1;       // of kFull

  bool operator==(const Recompute&) const = default;

  // The flag `one` of `modules` if the granularity is selective, else false.
  bool selects(bool Modules::*one) const {
    return granularity == Granularity::kSelective && modules.*one;
  }
};

}  // namespace ferry::models
