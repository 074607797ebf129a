// Copies between ranks: what the shards that ranks hold of some tensors have to give to the shards
// that ranks want of the same tensors. The geometry is a CopyPlan's; here every replica that is
// wanted gets its copy, out of the rank's own memory where that holds the box, else from one of the
// ranks that do. A pure function of metadata: all ranks compute the same one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "distckpt/base/box.h"
#include "distckpt/base/dtype.h"
#include "distckpt/plan/sharded_tensor.h"

namespace ferry::distckpt {

// A shard by its place among those that its rank names.
struct ShardOfRank {
  int rank = 0;
  std::uint32_t shard = 0;
};

struct RankCopy {
  std::uint32_t tensor = 0;  // index into RankPlan::names
  Box box{};                 // in the global tensor
  ShardOfRank source{};
  ShardOfRank target{};
  DType dtype = DType::kBF16;

  std::int64_t num_bytes() const { return box.volume() * size_of(dtype); }
  bool is_local() const { return source.rank == target.rank; }
};

// Padding that the sources lack: zeros.
struct RankFill {
  std::uint32_t tensor = 0;
  Box box{};
  ShardOfRank target{};
};

struct RankPlan {
  std::vector<std::string> names{};
  std::vector<RankCopy> copies{};  // by tensor
  std::vector<RankFill> fills{};
};

// Plans the copies from the shards that ranks hold to those that they want; replicas too. Tensors
// are matched by key. If their shapes differ, one side is padded behind the other's end. Throws
// Error(kLayout) that names the tensor unless both sides have the same tensors, of the same dtypes,
// each element exactly once but for replicas.
RankPlan plan_between_ranks(const std::vector<std::vector<ShardedTensor>>& sources,
                            const std::vector<std::vector<ShardedTensor>>& targets);

}  // namespace ferry::distckpt
