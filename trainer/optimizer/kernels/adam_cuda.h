// adam.h on a GPU. A build for the host alone refuses.
#pragma once

#include "trainer/optimizer/kernels/adam.h"
#include "trainer/optimizer/kernels/adam_formula.h"

namespace ferry::trainer {

void adam_update_cuda(const AdamTensors& tensors, const AdamFactors& factors);
at::Tensor squared_sum_cuda(const at::Tensor& x);

}  // namespace ferry::trainer
