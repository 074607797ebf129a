// Tensors that are quantised when they are read: rows of blocks at a time, elements and scales.
#pragma once

#include <cstdint>
#include <vector>

#include "distckpt/elements/dequantize.h"
#include "distckpt/elements/quantize.h"
#include "distckpt/plan/copy_plan.h"
#include "distckpt/plan/layout.h"

namespace ferry::distckpt {

// The two tensors that took the place of one: indices in the layout.
struct QuantizedTensor {
  std::uint32_t elements = 0;
  std::uint32_t scales = 0;
};

// Adds what each tensor of `plan` becomes to `layout`, whose first storages are those that the plan
// reads: quantize.h says what is computed, whenever a FileSource of the layout reads it.
//   kE4M3  [rows, columns], or some such matrices [experts, rows, columns]: elements in F8_E4M3,
//          scales F32, one for each block of 128 x 128 of a matrix
//   kE2M1  [experts, columns, rows], as GPT-OSS has them: elements U8 [experts, rows, columns / 32,
//          16], scales U8 [experts, rows, columns / 32]
// `scale` is for kE4M3. Throws Error(kLayout) naming a tensor of another shape.
std::vector<QuantizedTensor> add_quantized(CopyPlan plan,
                                           Encoding encoding,
                                           E4M3Scale scale,
                                           Layout& layout);

}  // namespace ferry::distckpt
