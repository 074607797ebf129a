// Weights from the memory of ranks to the memory of ranks: the executor of a RankPlan. It turns the
// trainer's shards into the rollout's, for any two meshes, which may have no rank in common.
//
// A rank receives only the elements that it lacks. They are packed into buckets; all messages of a
// rank in a round go in one batch, and the next round is packed while one is under way. Nothing is
// gathered: the bucket bounds the staging memory, whatever the model's size, and a rank keeps only
// the StridedCopies of its own part of the plan.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "distckpt/plan/rank_plan.h"
#include "distckpt/plan/sharded_tensor.h"
#include "models/distributed/process_group.h"
#include "models/distributed/world.h"
#include "models/reshard/delta.h"
#include "models/reshard/strided_copies.h"

namespace ferry::models {

struct ReshardOptions {
  std::int64_t bucket_bytes = std::int64_t{512} << 20;  // that a rank sends in a round, about
  // Sends only the changes of each message since the last run, where they are smaller. Nothing else
  // may write to the target's shards between runs. For slow links: finding the changes reads all of
  // the message.
  Delta delta = Delta::kOff;
};

struct ReshardReport {
  std::int64_t bytes_in_place = 0;  // of shards that are the same memory on both sides
  std::int64_t bytes_local = 0;     // copied within this rank
  std::int64_t bytes_sent = 0;
  std::int64_t bytes_received = 0;
  std::int64_t staging_bytes = 0;  // at most at a time
  std::int64_t kept_bytes = 0;     // of what was sent last, for deltas
  std::int64_t rounds = 0;
};

class Resharder {
 public:
  // Called by all ranks of the world, which outlives it, with the shards that each holds and those
  // that it wants; either may be empty. Plans once; does not touch the shards' memory before run().
  // Throws Error(kLayout) on every rank if the two sides do not fit each other.
  Resharder(World& world,
            const std::string& name,
            std::vector<distckpt::LocalShard> source,
            std::vector<distckpt::LocalShard> target,
            ReshardOptions options = {});

  // Sets new addresses of the same shards, which keep their layout. Shards of one owner move
  // together: the vectors hold the address of the first shard of each owner, in the order of the
  // shards. A shard without owner has an entry of its own.
  void set_memory(const std::vector<std::byte*>& source, const std::vector<std::byte*>& target);

  // Moves the bytes. Called by all ranks. On a GPU the copies are ordered on the current stream:
  // after work that was enqueued before, and before work that is enqueued later.
  ReshardReport run();
  // Calls run(), then compares the digests of every message on both sides. Throws Error(kCorrupt)
  // that names the ranks and a tensor if one differs.
  ReshardReport run_and_verify();

  const distckpt::RankPlan& plan() const { return plan_; }
  const ProcessGroup& ranks() const { return group_; }  // all of the world

 private:
  // The bytes that go between this rank and a peer in a round, a range of the round's staging
  // memory.
  struct Message {
    int peer = 0;
    bool sends = true;
    std::uint32_t tensor = 0;  // the first of it
    std::int64_t offset = 0;
    std::int64_t bytes = 0;
    at::Tensor sent{};  // the last time, for deltas
  };
  struct Round {
    std::vector<Message> messages{};
    std::int64_t bytes = 0;
    StridedCopies pack{};
    StridedCopies unpack{};
    StridedCopies repack{};  // for deltas: what unpack has written before
  };
  // A round's messages on their way.
  struct Transfer {
    std::vector<at::Tensor> changes{};  // of each message; undefined: it goes whole
    Pending pending{};
  };

  // A shard that is planned: its memory's address comes with each run.
  struct Shard {
    distckpt::ShardedTensor tensor{};
    distckpt::Dims strides{};  // in bytes
    std::int32_t memory = 0;   // its number among addresses_
    std::int64_t offset = 0;   // in bytes, from the first shard of the memory
  };
  struct Side {
    std::vector<Shard> shards{};
    std::size_t num_memories = 0;
  };

  static BoxEnd end_of(const Shard& shard, const distckpt::Box& box);
  void make_rounds(std::int64_t bucket_bytes);
  void plan_local();
  void fill_padding() const;
  void find_changes(Round& round, const at::Tensor& buffer, Transfer& transfer) const;
  Transfer begin(Round& round, const at::Tensor& buffer, ReshardReport& report) const;
  using MessageDigest = std::pair<std::string, std::string>;
  ReshardReport move(std::vector<MessageDigest>* digests);

  World& world_;
  ProcessGroup group_;
  Delta delta_;
  Side source_, target_;
  distckpt::RankPlan plan_;
  Addresses addresses_;  // of the source's memories, then of the target's
  std::vector<BoxCopy> local_copies_;
  std::int64_t local_bytes_ = 0;
  std::int64_t bytes_in_place_ = 0;  // of them
  StridedCopies local_;
  std::vector<Round> rounds_;
};

}  // namespace ferry::models
