#include "models/device_box_io.h"

#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <span>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "distckpt/error.h"
#include "distckpt/schedule.h"

namespace ferry::models {
namespace {

using distckpt::ChecksumPart;
using distckpt::Region;

void check(cudaError_t status, std::string_view what) {
  require(status == cudaSuccess, ErrorKind::kDevice, "{}: {}", what, cudaGetErrorString(status));
}

// The device of a thread, for as long as it lasts.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

class PinnedMemory : public std::pmr::memory_resource {
  void* do_allocate(std::size_t bytes, std::size_t /*alignment*/) override {
    void* data = nullptr;  // begins at a page
    check(cudaHostAlloc(&data, bytes, cudaHostAllocPortable), "allocating pinned memory");
    return data;
  }
  void do_deallocate(void* data, std::size_t /*bytes*/, std::size_t /*alignment*/) override {
    cudaFreeHost(data);
  }
  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
    return this == &other;
  }
};

// An event, and the stream that it is recorded on.
class Mark {
 public:
  Mark() { check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate"); }
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;
  ~Mark() { cudaEventDestroy(event_); }
  void record(cudaStream_t stream) { check(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  void hold_back(cudaStream_t stream) {
    check(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent");
  }
  void wait() { check(cudaEventSynchronize(event_), "copying to or from a device"); }

 private:
  cudaEvent_t event_ = nullptr;
};

// Streams of our own, one for each device, behind what its current stream has to do.
class CopyStreams {
 public:
  explicit CopyStreams(const std::vector<distckpt::Storage>& storages) {
    for (const auto& storage : storages) {
      const auto* memory = std::get_if<distckpt::MemoryStorage>(&storage);
      if (memory == nullptr || memory->device < 0 || streams_.contains(memory->device)) continue;
      const OnDevice on(memory->device);
      const auto device = static_cast<c10::DeviceIndex>(memory->device);
      const auto stream = c10::cuda::getStreamFromPool(false, device);
      Mark before;
      before.record(c10::cuda::getCurrentCUDAStream(device).stream());
      before.hold_back(stream.stream());
      streams_.emplace(memory->device, stream);
    }
  }

  cudaStream_t of(int device) const { return streams_.at(device).stream(); }

  void synchronize() const {
    for (const auto& [_, stream] : streams_)
      check(cudaStreamSynchronize(stream.stream()), "copying to or from a device");
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
  // The innermost runs are the rows of one copy.
  std::int64_t rows = 1;
  std::int64_t pitch = runs.run_bytes;
  if (const int rank = runs.counts.rank(); rank > 0) {
    rows = runs.counts[rank - 1];
    pitch = runs.strides[rank - 1];
    runs.counts[rank - 1] = 1;
  }
  const auto width = static_cast<std::size_t>(runs.run_bytes);
  distckpt::for_each_run(runs, [&](std::int64_t offset, std::int64_t index) {
    auto* const there = device + offset;
    auto* const here = packed + index * rows * runs.run_bytes;
    const bool in = kind == cudaMemcpyHostToDevice;
    check(cudaMemcpy2DAsync(in ? there : here, in ? static_cast<std::size_t>(pitch) : width,
                            in ? here : there, in ? width : static_cast<std::size_t>(pitch), width,
                            static_cast<std::size_t>(rows), kind, stream),
          "copying to or from a device");
  });
}

PinnedMemory& pinned_memory() {
  static PinnedMemory memory;
  return memory;
}

// A pinned buffer, and the end of the copy that starts from it.
struct Buffer {
  static constexpr std::size_t kBytes = 2 * distckpt::kTaskBytes;
  Buffer() : data(static_cast<std::byte*>(pinned_memory().allocate(kBytes))) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { pinned_memory().deallocate(data, kBytes); }

  std::byte* data;
  Mark copied;
};

class DeviceSink : public distckpt::MemorySink {
 public:
  explicit DeviceSink(const distckpt::Layout& layout) : MemorySink(layout), streams_(storages()) {}
  ~DeviceSink() override { drain(); }
  DeviceSink(const DeviceSink&) = delete;
  DeviceSink& operator=(const DeviceSink&) = delete;

  void write(const Region& region,
             std::span<const std::byte> packed,
             std::vector<ChecksumPart>& parts) override {
    const auto& memory = memory_of(storages(), region);
    if (memory.device < 0) return MemorySink::write(region, packed, parts);
    const OnDevice on(memory.device);
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
    if (bytes > Buffer::kBytes) return {};
    const OnDevice on(memory.device);
    return {take_buffer(memory.device), bytes};
  }

  void put(const Region& region, std::span<std::byte> leased) override {
    const auto& memory = memory_of(storages(), region);
    if (memory.device < 0) return MemorySink::put(region, leased);
    const OnDevice on(memory.device);
    const auto stream = streams_.of(memory.device);
    const std::lock_guard lock(mutex_);
    const auto buffer = leased_.extract(leased.data());
    require(!buffer.empty(), ErrorKind::kBug, "a buffer comes back that was not leased");
    copy_region(memory.data, region, leased.data(), cudaMemcpyHostToDevice, stream);
    buffer.mapped()->copied.record(stream);
    in_flight_[memory.device].push_back(std::move(buffer.mapped()));
    count(region);
    came_back_.notify_one();
  }

  void cancel() override {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
    came_back_.notify_all();
  }

  void finish() override {
    streams_.synchronize();
    MemorySink::finish();
  }

 private:
  static constexpr int kMaxBuffers = 32;

  // A new one as long as there may be more; else the one of this device whose copy began first.
  std::byte* take_buffer(int device) {
    std::unique_lock lock(mutex_);
    auto& waiting = in_flight_[device];
    auto& made = num_buffers_[device];
    came_back_.wait(lock, [&] { return cancelled_ || !waiting.empty() || made < kMaxBuffers; });
    require(!cancelled_, ErrorKind::kCancelled, "interrupted");
    std::unique_ptr<Buffer> buffer;
    if (made < kMaxBuffers) {
      ++made;
      lock.unlock();
      buffer = std::make_unique<Buffer>();
    } else {
      buffer = std::move(waiting.front());
      waiting.pop_front();
      lock.unlock();
      buffer->copied.wait();
    }
    auto* const data = buffer->data;
    lock.lock();
    leased_.emplace(data, std::move(buffer));
    return data;
  }

  // Copies start from buffers that are about to go, also after an error.
  void drain() noexcept {
    try {
      streams_.synchronize();
    } catch (const Error&) {  // whoever asked was told
    }
  }

  CopyStreams streams_;
  std::mutex mutex_;
  std::condition_variable came_back_;
  bool cancelled_ = false;
  std::map<int, int> num_buffers_;
  std::map<int, std::deque<std::unique_ptr<Buffer>>> in_flight_;  // by device
  std::map<std::byte*, std::unique_ptr<Buffer>> leased_;
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
    const OnDevice on(memory.device);
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
