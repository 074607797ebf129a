// What the shards of a model hold at one moment, on the host: whoever writes it to files need not
// wait for training, nor training for it. Each storage is copied once, as it lies.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "distckpt/sharded_tensor.h"

namespace ferry::trainer {

// The same shards, in memory of their own, which their owners keep. `tensors` are all whose
// storages they lie in. When it returns the copy is complete.
std::vector<distckpt::LocalShard> snapshot_on_host(const std::vector<at::Tensor>& tensors,
                                                   std::vector<distckpt::LocalShard> shards);

}  // namespace ferry::trainer
