// Memory of the host that a device copies from and to while it does something else.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace ferry::models {

// Zeros [bytes], uint8, pinned where `device` is a GPU. Exactly so many bytes: LibTorch's own
// pinned memory is rounded up to a power of two. Pages are touched by many threads, since pinning
// memory takes longer than copying it: keep it. Throws std::bad_alloc where the host has no more.
at::Tensor host_bytes(std::int64_t bytes, c10::Device device);

}  // namespace ferry::models
