// Triangular systems in fp32, of which the gated delta rule has one in each chunk. LibTorch solves
// them by MKL, which on some processors adds up in other orders on one thread than on several.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

#include "models/spec/alignment.h"

namespace ferry::models {

// system [.., n, n], right [.., n, columns], with the same sizes in front -> the solution, like
// `right`, of the lower triangle with ones on its diagonal: what stands there and above is not
// read. Differentiable. kBitwise on the host takes fp32 and n of at most 192, and has an order that
// does not depend on the threads (triangle_order()); throws Error(kDevice) without AVX2 and FMA.
at::Tensor solve_unit_triangular(const at::Tensor& system,
                                 const at::Tensor& right,
                                 Alignment alignment);

// The orders of host::UnitTriangle in which kBitwise solves systems.
enum class TriangleOrder : std::uint8_t {
  kRows,    // all rows are one block: MKL's code for AVX2 on one thread of an Intel processor
  kBlocks,  // of 48 rows: its code for AVX-512
  kLanes,   // its code for AMD's processors
};
std::string_view name_of(TriangleOrder order);

// The order of this machine, measured once: the one in which LibTorch solves, if it is kBlocks or
// kLanes; else kRows.
TriangleOrder triangle_order();

}  // namespace ferry::models
