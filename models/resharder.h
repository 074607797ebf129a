// Weights from the memory of ranks to the memory of ranks: the executor of a RankPlan. Training's
// shards become the rollout's, at any two meshes, also of ranks that have nothing in common.
//
// A rank receives only what it lacks. What has to travel is packed into buckets, all that a rank
// sends and receives in a round goes in one batch, and the next round is packed while one is under
// way. Nothing is gathered: staging memory is bounded by the bucket, whatever the model's size.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "distckpt/rank_plan.h"
#include "distckpt/sharded_tensor.h"
#include "models/process_group.h"
#include "models/world.h"

namespace ferry::models {

struct ReshardOptions {
  std::int64_t bucket_bytes = std::int64_t{512} << 20;  // that a rank sends in a round, about
};

struct ReshardReport {
  std::int64_t bytes_in_place = 0;  // of shards that are the same memory on both sides
  std::int64_t bytes_local = 0;     // copied within this rank
  std::int64_t bytes_sent = 0;
  std::int64_t bytes_received = 0;
  std::int64_t staging_bytes = 0;  // at most at a time
  std::int64_t rounds = 0;
};

class Resharder {
 public:
  // Called by all ranks of the world, which outlives it, with what each holds and what it wants,
  // either perhaps nothing; their memory is not touched before run(). Plans once. Throws
  // Error(kLayout) on every rank if the two sides do not fit each other.
  Resharder(World& world,
            const std::string& name,
            std::vector<distckpt::LocalShard> source,
            std::vector<distckpt::LocalShard> target,
            ReshardOptions options = {});

  // The same shards in other memory.
  void set_memory(std::vector<distckpt::LocalShard> source,
                  std::vector<distckpt::LocalShard> target);

  // Called by all ranks. On a GPU what was enqueued on the current stream comes first, and what is
  // enqueued later finds the new bytes.
  ReshardReport run();
  // run(), and afterwards the digest of every message on both of its sides. Throws Error(kCorrupt)
  // that names the ranks and a tensor.
  ReshardReport run_and_verify();

  const distckpt::RankPlan& plan() const { return plan_; }
  const ProcessGroup& ranks() const { return group_; }  // all of the world

 private:
  // A part of a copy that goes in one message, and where in it.
  struct Part {
    const distckpt::RankCopy* copy = nullptr;
    distckpt::Box box{};
    std::int64_t offset = 0;  // bytes
  };
  struct Message {
    int peer = 0;
    bool sends = true;
    std::vector<Part> parts{};
    std::int64_t bytes = 0;
  };
  using Round = std::vector<Message>;  // of this rank

  void make_rounds(std::int64_t bucket_bytes);
  void add_message(std::size_t round, Message message);
  at::Tensor view(const std::vector<distckpt::LocalShard>& shards,
                  const distckpt::ShardOfRank& at,
                  const distckpt::Box& box) const;
  at::Tensor packed(const at::Tensor& bytes, const Part& part) const;
  ReshardReport move(std::vector<std::string>* digests);

  World& world_;
  ProcessGroup group_;
  std::vector<distckpt::LocalShard> source_, target_;
  distckpt::RankPlan plan_;
  std::vector<Round> rounds_;
};

}  // namespace ferry::models
