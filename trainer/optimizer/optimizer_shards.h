// A stretch of a leaf, cut without regard to rows, as boxes of whole tensors: so that an
// optimizer's shards are loaded and saved by the same plans as weights.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "distckpt/plan/sharded_tensor.h"
#include "models/tensor_parallel/parameters.h"

namespace ferry::trainer {

// Elements [begin, begin + data.numel()) of a leaf, which lie in `data`, fp32 or bf16, as
// parts of the tensors "<prefix><key>" of its parameters. Data parallel ranks hold other elements,
// not replicas.
std::vector<distckpt::LocalShard> shards_of_range(const models::Parameters& parameters,
                                                  const models::Leaf& leaf,
                                                  std::int64_t begin,
                                                  const std::string& prefix,
                                                  const at::Tensor& data);

}  // namespace ferry::trainer
