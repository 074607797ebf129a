// The peer of a reshard: every rank gets every tensor whole, as verl's per_tensor_generator does it
// (verl/utils/megatron_utils.py): a broadcast from the stage that has it, an all-gather over tensor
// or expert parallel ranks, and each rank keeps its part. Ranks that do not train receive from the
// first rank that does (verl's nccl checkpoint engine). The owners are known before, so no names
// are sent and nothing is pickled. Tensors go one at a time, or in buckets of as many as fit.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "models/distributed/process_group.h"
#include "tests/bench/reshard/mesh_weights.h"

namespace ferry {

class GatherAndBroadcast {
 public:
  // Called by all ranks of the world. All outlive it.
  GatherAndBroadcast(models::World& world,
                     const std::string& name,
                     const models::TransformerConfig& config,
                     const BenchMesh& source_mesh,
                     const MeshWeights& source,
                     const BenchMesh& target_mesh,
                     const MeshWeights& target);

  // Called by all ranks. Buckets are of so many bytes of whole tensors at most, and one tensor at
  // least.
  void run(std::int64_t bucket_bytes);

 private:
  // Parameters of a stage that are gathered together, by their index among those of its ranks.
  struct Bucket {
    int stage = 0;
    bool expert = false;
    bool gathered = false;
    std::vector<std::size_t> parameters{};
    std::int64_t elements = 0;  // of one rank's part
  };

  void move(const Bucket& bucket);
  void keep(const Bucket& bucket, const at::Tensor& gathered);
  // The ranks of `ranks` that differ only in their place within the tensor, or expert, parallel
  // group.
  std::vector<int> gather_group(int stage, bool expert, int like) const;

  const BenchMesh& mesh_;
  const MeshWeights& source_;
  int index_;  // of this rank in the source mesh
  at::Device device_;
  bool receives_ = false;  // what rank 0 of the source mesh has
  bool sends_ = false;
  std::vector<std::vector<models::ParameterSpec>> specs_;  // of each rank of the source mesh
  std::unordered_map<std::string, const models::Parameter*> wanted_;
  models::ProcessGroup stages_, tensor_, expert_, others_;
};

}  // namespace ferry
