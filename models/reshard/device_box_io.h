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

// Of the shards that a MeshLayout's layout places in memory; they must outlive it. What was
// enqueued on the current stream of their devices before comes first.
std::unique_ptr<distckpt::MemorySink> make_memory_sink(const distckpt::Layout& layout);
std::unique_ptr<distckpt::BoxSource> make_memory_source(const distckpt::Layout& layout);

// Pinned memory for ExecutorOptions::staging, without a device the heap. A save is faster with it,
// and a load that widens; else a load goes through the sink's own buffers, and pinning costs its
// time. Throws Error(kDevice) where the system gives no more.
std::pmr::memory_resource* staging_memory();

}  // namespace ferry::models
