#include "models/device/host_memory.h"

#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <new>

#include "distckpt/base/integers.h"
#include "models/device/device.h"

namespace ferry::models {
namespace {

constexpr std::int64_t kPage = 4096;
constexpr std::int64_t kTouchedAtOnce = std::int64_t{64} << 20;  // by a thread

void touch(std::byte* data, std::int64_t bytes) {
  const auto parts = distckpt::ceil_div(bytes, kTouchedAtOnce);
  at::parallel_for(0, parts, 1, [&](std::int64_t begin, std::int64_t end) {
    for (auto at = begin * kTouchedAtOnce; at < std::min(end * kTouchedAtOnce, bytes); at += kPage)
      const_cast<volatile std::byte&>(data[at]) = std::byte{0};
  });
}

}  // namespace

at::Tensor host_bytes(std::int64_t bytes, c10::Device device) {
  const auto options = at::TensorOptions().dtype(at::kByte);
  if (!device.is_cuda() || bytes == 0) return at::zeros({bytes}, options);
  const auto size = static_cast<std::size_t>(bytes);
  auto* const data =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  ::madvise(data, size, MADV_HUGEPAGE);
  touch(static_cast<std::byte*>(data), bytes);
  try {
    pin(data, size);
  } catch (...) {
    ::munmap(data, size);
    throw;
  }
  const auto give_back = [size](void* pinned) {
    unpin(pinned);
    ::munmap(pinned, size);
  };
  return at::from_blob(data, {bytes}, give_back, options);
}

}  // namespace ferry::models
