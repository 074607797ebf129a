// The memory of this rank as an executor's source and sink, on the host or on a device. Bytes for a
// device are read from the files straight into pinned buffers, from which they are copied while the
// next ones are read. In a build without CUDA there is the host alone.
#pragma once

#include <memory>
#include <memory_resource>

#include "distckpt/execute/memory_io.h"
#include "distckpt/plan/box_io.h"
#include "distckpt/plan/layout.h"

namespace ferry::models {

// The sink and the source of shards that `layout` places in memory. The shards must outlive them.
// Transfers come after all work that was enqueued before on the current streams of their devices.
std::unique_ptr<distckpt::MemorySink> make_memory_sink(const distckpt::Layout& layout);
std::unique_ptr<distckpt::BoxSource> make_memory_source(const distckpt::Layout& layout);

// Pinned memory for ExecutorOptions::staging; without a device the heap. It makes a save faster,
// and a load that widens. Other loads go through the sink's own buffers, and only pay for the
// pinning. Allocations throw Error(kDevice) where the system gives no more.
std::pmr::memory_resource* staging_memory();

}  // namespace ferry::models
