// Copies all boxes of a table in one launch on a GPU, 16 bytes at a time where both sides are
// aligned.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace ferry::models {

// boxes: [boxes, sizeof(StridedBox)] bytes; box_of_tile: [tiles] int32; memories: [memories] int64,
// addresses. A box with the same address on both sides is left alone. `staging` is memory -1.
void strided_copy_cuda(const at::Tensor& boxes,
                       const at::Tensor& box_of_tile,
                       const at::Tensor& memories,
                       std::byte* staging);

}  // namespace ferry::models
