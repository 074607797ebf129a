// All boxes of a table at once, on a GPU: one launch, 16 bytes at a time where both sides allow it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace ferry::models {

// boxes: [boxes, sizeof(StridedBox)] bytes; box_of_tile: [tiles] int32; memories: [memories] int64,
// addresses. A box whose both ends are the same address is left alone.
void strided_copy_cuda(const at::Tensor& boxes,
                       const at::Tensor& box_of_tile,
                       const at::Tensor& memories,
                       std::byte* staging);

}  // namespace ferry::models
