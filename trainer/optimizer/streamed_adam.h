// Adam over masters and moments that lie on the host, and never come to the device whole: piece by
// piece they go up on one stream, are updated on the current one, and go down on a third, so that
// both directions of the bus and the kernels run side by side.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "models/spec/costs.h"
#include "trainer/optimizer/kernels/adam.h"

namespace ferry::trainer {

using models::kMaxStagingBytes;
using models::kNumStagingSlots;
using models::kStagingElements;

// Calls with the begin and the size of stretches of at most so many elements, one after the other.
void for_stretches(std::int64_t elements,
                   std::int64_t at_once,
                   const std::function<void(std::int64_t begin, std::int64_t size)>& body);

// The bytes of adam_update(), shard by shard. State that does not lie where the gradients are
// passes through slots of `slot_elements` (a multiple of 64) each, and must be pinned
// (models::host_bytes()); where it lies there, nothing is copied. When it returns the state is
// complete; gradients and parameters go by the current stream.
void streamed_adam_update(const std::vector<AdamTensors>& shards,
                          const AdamScalars& scalars,
                          std::int64_t slot_elements = kStagingElements);

}  // namespace ferry::trainer
