#include "trainer/optimizer/host_snapshot.h"

#include <iterator>
#include <map>

#include "distckpt/base/error.h"
#include "models/device/device.h"
#include "models/device/host_memory.h"
#include "trainer/optimizer/offload.h"

namespace ferry::trainer {

// Made anew unless nobody else has it.
at::Tensor HostSnapshot::memory(std::size_t index, std::size_t size, at::Device device) {
  if (copies_.size() <= index) copies_.resize(index + 1);
  auto& copy = copies_[index];
  if (!copy || copy.use_count() > 1 || copy->nbytes() != size) {
    copy.reset();
    copy = std::make_shared<const at::Tensor>(
        models::host_bytes(static_cast<std::int64_t>(size), device));
  }
  return *copy;
}

std::vector<distckpt::LocalShard> HostSnapshot::take(const std::vector<at::Tensor>& tensors,
                                                     std::vector<distckpt::LocalShard> shards) {
  std::map<const std::byte*, std::size_t> places;  // in copies_, by the storage's first byte
  for (const auto& tensor : tensors) {
    const auto& storage = tensor.storage();
    const auto* const first = static_cast<const std::byte*>(storage.data());
    if (storage.nbytes() == 0 || !places.emplace(first, places.size()).second) continue;
    copy_to_host(storage, memory(places.size() - 1, storage.nbytes(), storage.device()));
  }
  copies_.resize(places.size());
  for (const auto& tensor : tensors) models::synchronize(tensor.device());
  for (auto& shard : shards) {
    const auto behind = places.upper_bound(shard.data);
    require(behind != places.begin(), ErrorKind::kBug, "{}: lies in no tensor that was copied",
            shard.tensor.key);
    const auto& [first, place] = *std::prev(behind);
    const auto& copy = copies_[place];
    require(shard.data < first + copy->numel(), ErrorKind::kBug,
            "{}: lies in no tensor that was copied", shard.tensor.key);
    shard.data = static_cast<std::byte*>(copy->mutable_data_ptr()) + (shard.data - first);
    shard.device = -1;
    shard.owner = copy;
  }
  return shards;
}

}  // namespace ferry::trainer
