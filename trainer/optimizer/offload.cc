#include "trainer/optimizer/offload.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "models/device/device.h"
#include "models/device/host_memory.h"
#include "models/distributed/world.h"

namespace ferry::trainer {
namespace {

// A storage as bytes.
at::Tensor bytes_of(const c10::Storage& storage, std::size_t size) {
  auto bytes = at::empty({0}, at::TensorOptions().dtype(at::kByte).device(storage.device()));
  bytes.set_(storage, 0, {static_cast<std::int64_t>(size)}, {1});
  return bytes;
}

std::vector<at::Tensor> parameters_of(const std::vector<models::GPTModel*>& chunks) {
  std::vector<at::Tensor> tensors;
  for (const auto* const chunk : chunks) {
    for (const auto& leaf : chunk->parameters().leaves()) tensors.push_back(leaf.value);
  }
  return tensors;
}

std::vector<at::Tensor> gradients_of(const DistributedDataParallel* ddp) {
  std::vector<at::Tensor> tensors;
  if (ddp == nullptr) return tensors;
  for (const auto& buffer : ddp->buffers()) tensors.push_back(buffer.grads());
  return tensors;
}

}  // namespace

void copy_to_host(const c10::Storage& storage, const at::Tensor& copy) {
  copy.copy_(bytes_of(storage, storage.nbytes()), /*non_blocking=*/true);
}

OffloadableMemory::OffloadableMemory(const std::vector<at::Tensor>& tensors, bool keep)
    : keep_(keep) {
  for (const auto& tensor : tensors) {
    const auto& storage = tensor.storage();
    const bool known = std::ranges::any_of(
        blocks_, [&](const Block& block) { return block.storage.is_alias_of(storage); });
    if (!known && storage.nbytes() > 0)
      blocks_.push_back({.storage = storage, .size = storage.nbytes()});
  }
}

// On a GPU copies and allocations are in the order of the stream: nobody waits.
void OffloadableMemory::to_host() {
  if (std::exchange(resting_, true)) return;
  for (auto& block : blocks_) {
    auto* const storage = block.storage.unsafeGetStorageImpl();
    if (keep_) {
      if (!block.on_host.defined())
        block.on_host =
            models::host_bytes(static_cast<std::int64_t>(block.size), block.storage.device());
      copy_to_host(block.storage, block.on_host);
    }
    storage->set_data_ptr_noswap(at::DataPtr(nullptr, block.storage.device()));
    storage->set_nbytes(0);
  }
}

void OffloadableMemory::to_device() {
  if (!std::exchange(resting_, false)) return;
  for (auto& block : blocks_) {
    auto* const storage = block.storage.unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(storage->allocator()->allocate(block.size));
    storage->set_nbytes(block.size);
    auto bytes = bytes_of(block.storage, block.size);
    if (keep_)
      bytes.copy_(block.on_host, /*non_blocking=*/true);
    else
      bytes.zero_();
  }
}

std::int64_t OffloadableMemory::device_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& block : blocks_) bytes += static_cast<std::int64_t>(block.storage.nbytes());
  return bytes;
}

std::int64_t OffloadableMemory::host_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& block : blocks_)
    bytes += resting_ && keep_ ? static_cast<std::int64_t>(block.size) : 0;
  return bytes;
}

Offload::Offload(const std::vector<models::GPTModel*>& chunks, const DistributedDataParallel* ddp)
    : device_(chunks.front()->mesh().world().device()),
      params_(parameters_of(chunks), /*keep=*/true),
      grads_(gradients_of(ddp), /*keep=*/false) {}

void Offload::to_host(OffloadFlags which) {
  if (which.param) params_.to_host();
  if (which.grad) grads_.to_host();
  models::release_cached_memory(device_);
}

void Offload::to_device(OffloadFlags which) {
  if (which.param) params_.to_device();
  if (which.grad) grads_.to_device();
}

}  // namespace ferry::trainer
