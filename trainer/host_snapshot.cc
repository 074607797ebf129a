#include "trainer/host_snapshot.h"

#include <iterator>
#include <map>
#include <memory>

#include "distckpt/error.h"
#include "models/device.h"
#include "trainer/offload.h"

namespace ferry::trainer {

std::vector<distckpt::LocalShard> snapshot_on_host(const std::vector<at::Tensor>& tensors,
                                                   std::vector<distckpt::LocalShard> shards) {
  std::map<const std::byte*, std::shared_ptr<const at::Tensor>>
      copies;  // by the storage's first byte
  for (const auto& tensor : tensors) {
    const auto& storage = tensor.storage();
    const auto* const first = static_cast<const std::byte*>(storage.data());
    if (storage.nbytes() > 0 && !copies.contains(first))
      copies.emplace(first, std::make_shared<const at::Tensor>(copy_to_host(storage)));
  }
  if (!tensors.empty()) models::synchronize(tensors.front().device());
  for (auto& shard : shards) {
    const auto behind = copies.upper_bound(shard.data);
    require(behind != copies.begin(), ErrorKind::kBug, "{}: lies in no tensor that was copied",
            shard.tensor.key);
    const auto& [first, copy] = *std::prev(behind);
    require(shard.data < first + copy->numel(), ErrorKind::kBug,
            "{}: lies in no tensor that was copied", shard.tensor.key);
    shard.data = static_cast<std::byte*>(copy->mutable_data_ptr()) + (shard.data - first);
    shard.device = -1;
    shard.owner = copy;
  }
  return shards;
}

}  // namespace ferry::trainer
