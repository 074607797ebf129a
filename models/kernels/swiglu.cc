#include "models/kernels/swiglu.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/silu.h>

namespace ferry::models {

at::Tensor swiglu(const at::Tensor& gate_up) {
  const auto halves = gate_up.chunk(2, -1);
  return at::silu(halves[0]) * halves[1];
}

}  // namespace ferry::models
