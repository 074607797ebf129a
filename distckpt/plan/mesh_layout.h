// A Layout of what all ranks of a mesh hold: one side of the plans that load and save a parallel
// model. It is made from ShardedTensors, so that every rank has the same one, but for addresses: a
// rank knows those of its own memory, and of the others' only whose it is.
#pragma once

#include <vector>

#include "distckpt/plan/copy_plan.h"
#include "distckpt/plan/layout.h"
#include "distckpt/plan/rank_group.h"
#include "distckpt/plan/sharded_tensor.h"

namespace ferry::distckpt {

struct MeshLayout {
  int rank = 0;
  std::vector<std::vector<ShardedTensor>> ranks{};  // what each holds, replicas too
  std::vector<LocalShard> shards{};                 // what this one holds, and where

  // Every box once: in the memory of this rank where it holds a replica, else in that of the rank
  // that has the main one. Storage i + ranks.size() is shards[i].
  Layout layout{};

  bool is_mine(StorageId storage) const { return storage >= ranks.size(); }
};

// Throws Error(kLayout) that names tensor, box and ranks unless every element of every tensor is in
// exactly one main replica, and every other replica is the box of a main one, of the same dtype.
// Throws Error(kUsage) for memory that cannot be a shard: none, or strides that fold it. `ranks` of
// this rank are not looked at: they are `mine`.
MeshLayout make_mesh_layout(std::vector<std::vector<ShardedTensor>> ranks,
                            int rank,
                            std::vector<LocalShard> mine);

// The same of the ranks of a group, which tell each other what they hold. Throws on all of them, or
// on none.
MeshLayout gather_mesh_layout(const RankGroup& group, std::vector<LocalShard> mine);

// The part of `plan` whose target is in this rank's memory; of what is only read (padding), an
// equal share. Throws Error(kLayout) naming a shard of which the plan does not write every element.
CopyPlan part_of_rank(CopyPlan plan, const MeshLayout& mesh);

}  // namespace ferry::distckpt
