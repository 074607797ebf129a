// Activations that are computed again in the backward pass instead of being kept (Megatron-Core
// tensor_parallel/random.py, checkpoint, and its recompute_* settings; Chen et al. 2016). The
// second forward has the bits of the first, so gradients do not change.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

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

  // `one` where this is selective, else false.
  bool selects(bool Modules::*one) const {
    return granularity == Granularity::kSelective && modules.*one;
  }
};

using Computation = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

// What `body` makes of the inputs, of which alone the backward needs memory. Parameters that `body`
// computes with get their gradients when it is computed again; where no gradients are wanted this
// is body(inputs). `body` holds all it refers to: it is called once more, later, on autograd's
// thread.
std::vector<at::Tensor> recompute(const Computation& body, const std::vector<at::Tensor>& inputs);

}  // namespace ferry::models
