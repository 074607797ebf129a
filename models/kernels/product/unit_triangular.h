// Triangular systems in fp32, of which the gated delta rule has one in each chunk. LibTorch solves
// them by MKL, which on some processors adds up in other orders on one thread than on several.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "models/spec/alignment.h"

namespace ferry::models {

// system [.., n, n], right [.., n, columns], with the same sizes in front -> the solution, like
// `right`, of the lower triangle with ones on its diagonal: what stands there and above is not
// read. Differentiable. kBitwise on the host takes fp32 and n of at most 192, and has an order that
// does not depend on the threads (triangle_block()); throws Error(kDevice) without AVX2 and FMA.
at::Tensor solve_unit_triangular(const at::Tensor& system,
                                 const at::Tensor& right,
                                 Alignment alignment);

// Rows of the blocks in which kBitwise solves systems on this machine (host::UnitTriangle),
// measured once: 48 where LibTorch does so, by MKL's code for AVX-512; else all rows are one block,
// as by MKL's code for AVX2 on one thread.
std::int64_t triangle_block();

}  // namespace ferry::models
