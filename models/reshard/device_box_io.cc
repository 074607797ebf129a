#include "models/reshard/device_box_io.h"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/plan/schedule.h"

namespace ferry::models {
namespace {

using distckpt::ChecksumPart;
using distckpt::Region;

void check_copy(cudaError_t status, std::string_view what) {
  require(status == cudaSuccess, ErrorKind::kDevice, "{}: {}", what, cudaGetErrorString(status));
}

// Every call of CUDA makes a context on its thread's device, which takes half a GiB of it: a thread
// without a device of its own, where CUDA assumes device 0, calls CUDA beneath such a guard alone.
c10::cuda::CUDAGuard on_device(int device) {
  return c10::cuda::CUDAGuard(static_cast<c10::DeviceIndex>(device));
}

// On a device that has a context, if there is one.
c10::cuda::OptionalCUDAGuard on_a_device_in_use() {
  return c10::cuda::OptionalCUDAGuard(c10::cuda::getDeviceIndexWithPrimaryContext());
}

class PinnedMemory : public std::pmr::memory_resource {
  void* do_allocate(std::size_t bytes, std::size_t /*alignment*/) override {
    const auto on = on_a_device_in_use();
    void* data = nullptr;  // begins at a page
    check_copy(cudaHostAlloc(&data, bytes, cudaHostAllocPortable), "allocating pinned memory");
    return data;
  }
  void do_deallocate(void* data, std::size_t /*bytes*/, std::size_t /*alignment*/) override {
    const auto on = on_a_device_in_use();
    cudaFreeHost(data);
  }
  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
    return this == &other;
  }
};

// An event, and the stream that it is recorded on.
class Mark {
 public:
  Mark() {
    check_copy(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate");
  }
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;
  ~Mark() { cudaEventDestroy(event_); }
  void record(cudaStream_t stream) {
    check_copy(cudaEventRecord(event_, stream), "cudaEventRecord");
  }
  void hold_back(cudaStream_t stream) {
    check_copy(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent");
  }
  void wait() { check_copy(cudaEventSynchronize(event_), "copying to or from a device"); }

 private:
  cudaEvent_t event_ = nullptr;
};

// Streams of our own, one for each device. Each begins after the work that the device's current
// stream has at that time.
class CopyStreams {
 public:
  explicit CopyStreams(const std::vector<distckpt::Storage>& storages) {
    for (const auto& storage : storages) {
      const auto* memory = std::get_if<distckpt::MemoryStorage>(&storage);
      if (memory == nullptr || memory->device < 0 || streams_.contains(memory->device)) continue;
      const auto on = on_device(memory->device);
      const auto device = static_cast<c10::DeviceIndex>(memory->device);
      const auto stream = c10::cuda::getStreamFromPool(false, device);
      Mark before;
      before.record(c10::cuda::getCurrentCUDAStream(device).stream());
      before.hold_back(stream.stream());
      streams_.emplace(memory->device, stream);
    }
  }

  cudaStream_t of(int device) const { return streams_.at(device).stream(); }

  std::vector<int> devices() const {
    std::vector<int> all;
    all.reserve(streams_.size());
    for (const auto& [device, _] : streams_) all.push_back(device);
    return all;
  }

  void synchronize() const {
    for (const auto& [_, stream] : streams_)
      check_copy(cudaStreamSynchronize(stream.stream()), "copying to or from a device");
  }

 private:
  std::map<int, c10::cuda::CUDAStream> streams_;
};

// Enqueues the copy of a region of a device's memory to or from packed bytes of the host.
void copy_region(std::byte* device,
                 const Region& region,
                 std::byte* packed,
                 cudaMemcpyKind kind,
                 cudaStream_t stream) {
  auto runs = distckpt::fold_runs(region);
  if (runs.num_runs() == 0) return;
  const bool in = kind == cudaMemcpyHostToDevice;
  const auto width = static_cast<std::size_t>(runs.run_bytes);
  constexpr std::string_view kWhat = "copying to or from a device";
  if (runs.num_runs() == 1) {
    auto* const there = device + runs.offset;
    check_copy(cudaMemcpyAsync(in ? there : packed, in ? packed : there, width, kind, stream),
               kWhat);
    return;
  }
  // The innermost runs are the rows of one copy.
  const int last = runs.counts.rank() - 1;
  const auto rows = runs.counts[last];
  const auto pitch = static_cast<std::size_t>(runs.strides[last]);
  runs.counts[last] = 1;
  distckpt::for_each_run(runs, [&](std::int64_t offset, std::int64_t index) {
    auto* const there = device + offset;
    auto* const here = packed + index * rows * runs.run_bytes;
    check_copy(
        cudaMemcpy2DAsync(in ? there : here, in ? pitch : width, in ? here : there,
                          in ? width : pitch, width, static_cast<std::size_t>(rows), kind, stream),
        kWhat);
  });
}

PinnedMemory& pinned_memory() {
  static PinnedMemory memory;
  return memory;
}

// A pinned buffer, and the end of the copy that starts from it.
struct Buffer {
  std::byte* data = nullptr;
  Mark copied{};
};

// Buffers for the tasks of one device, pinned in one call, since each call takes long.
class BufferPool {
 public:
  static constexpr std::size_t kBytes = distckpt::kTaskBytes;

  BufferPool() : slab_(static_cast<std::byte*>(pinned_memory().allocate(kCount * kBytes))) {
    for (std::size_t i = 0; i < kCount; ++i) {
      buffers_.push_back(std::make_unique<Buffer>());
      buffers_.back()->data = slab_ + i * kBytes;
      idle_.push_back(buffers_.back().get());
    }
  }
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;
  ~BufferPool() { pinned_memory().deallocate(slab_, kCount * kBytes); }

  // Takes the buffer that was given back first, once no copy reads from it. Waits if there is none.
  std::byte* take() {
    std::unique_lock lock(mutex_);
    came_back_.wait(lock, [&] { return cancelled_ || !idle_.empty(); });
    require(!cancelled_, ErrorKind::kCancelled, "interrupted");
    auto* const buffer = idle_.front();
    idle_.pop_front();
    lock.unlock();
    buffer->copied.wait();
    return buffer->data;
  }

  // Gives a buffer back, after the copy that reads from it was enqueued.
  void give_back(const std::byte* data, cudaStream_t stream) {
    auto* const buffer = buffers_.at(static_cast<std::size_t>(data - slab_) / kBytes).get();
    buffer->copied.record(stream);
    const std::lock_guard lock(mutex_);
    idle_.push_back(buffer);
    came_back_.notify_one();
  }

  void cancel() {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
    came_back_.notify_all();
  }

 private:
  static constexpr std::size_t kCount = 32;  // 64 MiB
  std::byte* slab_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::mutex mutex_;
  std::condition_variable came_back_;
  std::deque<Buffer*> idle_;
  bool cancelled_ = false;
};

class DeviceSink : public distckpt::MemorySink {
 public:
  explicit DeviceSink(const distckpt::Layout& layout) : MemorySink(layout), streams_(storages()) {
    for (const int device : streams_.devices()) {
      const auto on = on_device(device);
      pools_.try_emplace(device);
    }
  }
  ~DeviceSink() override { drain(); }
  DeviceSink(const DeviceSink&) = delete;
  DeviceSink& operator=(const DeviceSink&) = delete;

  void write(const Region& region,
             std::span<const std::byte> packed,
             std::vector<ChecksumPart>& parts) override {
    const auto& memory = memory_of(storages(), region);
    if (memory.device < 0) return MemorySink::write(region, packed, parts);
    const auto on = on_device(memory.device);
    Mark copied;
    const auto stream = streams_.of(memory.device);
    copy_region(memory.data, region, const_cast<std::byte*>(packed.data()), cudaMemcpyHostToDevice,
                stream);
    copied.record(stream);
    copied.wait();
    count(region);
  }

  std::span<std::byte> lease(const Region& region) override {
    const auto& memory = memory_of(storages(), region);
    if (memory.device < 0) return MemorySink::lease(region);
    const auto bytes = static_cast<std::size_t>(region.num_bytes());
    if (bytes == 0 || bytes > BufferPool::kBytes) return {};
    const auto on = on_device(memory.device);
    return {pools_.at(memory.device).take(), bytes};
  }

  void put(const Region& region, std::span<std::byte> leased) override {
    const auto& memory = memory_of(storages(), region);
    if (memory.device < 0) return MemorySink::put(region, leased);
    const auto on = on_device(memory.device);
    const auto stream = streams_.of(memory.device);
    copy_region(memory.data, region, leased.data(), cudaMemcpyHostToDevice, stream);
    pools_.at(memory.device).give_back(leased.data(), stream);
    count(region);
  }

  void cancel() override {
    for (auto& [_, pool] : pools_) pool.cancel();
  }

  void finish() override {
    streams_.synchronize();
    MemorySink::finish();
  }

 private:
  // Waits for copies from buffers that are about to be destroyed, also after an error.
  void drain() noexcept {
    try {
      streams_.synchronize();
    } catch (const Error&) {  // the caller has got the error already
    }
  }

  CopyStreams streams_;
  std::map<int, BufferPool> pools_;  // by device
};

class DeviceSource : public distckpt::BoxSource {
 public:
  explicit DeviceSource(const distckpt::Layout& layout)
      : storages_(layout.storages()), host_(layout), streams_(storages_) {}

  void read(const Region& region,
            std::span<std::byte> packed,
            std::vector<ChecksumPart>& parts) override {
    const auto& memory = memory_of(storages_, region);
    if (memory.device < 0) return host_.read(region, packed, parts);
    const auto on = on_device(memory.device);
    Mark copied;
    const auto stream = streams_.of(memory.device);
    copy_region(memory.data, region, packed.data(), cudaMemcpyDeviceToHost, stream);
    copied.record(stream);
    copied.wait();
  }

 private:
  std::vector<distckpt::Storage> storages_;
  distckpt::MemorySource host_;
  CopyStreams streams_;
};

}  // namespace

std::unique_ptr<distckpt::MemorySink> make_memory_sink(const distckpt::Layout& layout) {
  return std::make_unique<DeviceSink>(layout);
}

std::unique_ptr<distckpt::BoxSource> make_memory_source(const distckpt::Layout& layout) {
  return std::make_unique<DeviceSource>(layout);
}

std::pmr::memory_resource* staging_memory() {
  int count = 0;
  const bool has_device = cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
  return has_device ? &pinned_memory() : std::pmr::new_delete_resource();
}

}  // namespace ferry::models
