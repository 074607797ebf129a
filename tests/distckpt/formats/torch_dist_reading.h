// Reads what a checkpoint in torch_dist says that it holds.
#pragma once

#include <cstddef>
#include <vector>

#include "distckpt/execute/executor.h"
#include "distckpt/execute/file_box_io.h"
#include "distckpt/formats/torch_dist.h"
#include "distckpt/plan/copy_plan.h"
#include "tests/support/memory_box_io.h"

namespace ferry::distckpt::torch_dist_test {

// Every tensor whole, row-major, by way of the planner and the executor.
inline std::vector<std::vector<std::byte>> read_all(const TorchDistLayout& resolved,
                                                    FileSource& source) {
  std::vector<std::vector<std::byte>> bytes;
  std::vector<ModelTensor> tensors;
  Layout memory;
  TensorMap map;
  for (const auto& tensor : resolved.layout.tensors()) {
    const auto index = static_cast<std::uint32_t>(tensors.size());
    const auto whole = Box::whole(tensor.shape);
    tensors.push_back({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
    map.links.push_back({.model = index, .model_box = whole, .stored = index, .stored_box = whole});
    bytes.emplace_back(static_cast<std::size_t>(tensor.num_bytes()));
    const auto storage = memory.add_storage(
        MemoryStorage{.data = bytes.back().data(), .size = std::ssize(bytes.back())});
    memory.add_tensor({.name = tensor.name,
                       .dtype = tensor.dtype,
                       .shape = tensor.shape,
                       .shards = {packed_shard(whole, tensor.dtype, storage, 0)}});
  }
  const auto plan = plan_copy(tensors, {.layout = &resolved.layout, .map = &map},
                              {.layout = &memory, .map = &map});
  support::MemorySink sink(memory);
  Executor({.threads = 2}).submit(plan, source, &sink).wait();
  return bytes;
}

inline std::vector<const TorchDistTensor*> all_tensors(const TorchDistCheckpoint& checkpoint) {
  std::vector<const TorchDistTensor*> all;
  for (const auto& tensor : checkpoint.tensors) all.push_back(&tensor);
  return all;
}

}  // namespace ferry::distckpt::torch_dist_test
