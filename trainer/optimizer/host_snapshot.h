// A copy on the host of what the shards of a model hold at one moment: whoever writes it to files
// need not wait for training, nor training for it. Each storage is copied once, as it lies.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "distckpt/plan/sharded_tensor.h"

namespace ferry::trainer {

// Its memory stays from one snapshot to the next: pages that are new, or newly pinned, take longer
// than what is copied into them.
class HostSnapshot {
 public:
  // The same shards, in memory of this snapshot's, which they share. `tensors` are all whose
  // storages they lie in. When it returns the copy is complete. What an earlier one gave has to be
  // gone, else it keeps its memory and this takes new.
  std::vector<distckpt::LocalShard> take(const std::vector<at::Tensor>& tensors,
                                         std::vector<distckpt::LocalShard> shards);

 private:
  at::Tensor memory(std::size_t index, std::size_t size, at::Device device);

  std::vector<std::shared_ptr<const at::Tensor>> copies_;  // [bytes], in the order of the storages
};

}  // namespace ferry::trainer
