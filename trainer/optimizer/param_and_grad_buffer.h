// The parameters of a model chunk that one group of ranks shares, in one piece of memory, and their
// gradients in another (Megatron-Core distributed/param_and_grad_buffer.py). The pieces are cut
// into buckets, each of which is summed over the group as a whole: every rank then has the sum of
// one part of it, its shard, which it updates and gives to the others.
//
// Leaves lie in the reverse order of their modules, in which their gradients come; each begins at a
// multiple of kBlock elements, and shards are cut there too.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "models/distributed/process_group.h"
#include "models/tensor_parallel/parameters.h"

namespace ferry::trainer {

inline constexpr std::int64_t kBlock = 64;

// A leaf's place, in elements of the buffer.
struct BufferSlot {
  std::size_t leaf = 0;
  std::int64_t begin = 0;
  std::int64_t size = 0;

  bool operator==(const BufferSlot&) const = default;
};

struct BucketLayout {
  std::int64_t begin = 0;
  std::int64_t end = 0;  // with padding: a multiple of ranks * kBlock behind `begin`
  std::vector<BufferSlot> slots{};

  bool operator==(const BucketLayout&) const = default;
};

struct LeafSize {
  std::size_t leaf = 0;
  std::int64_t size = 0;
  bool alone = false;  // in a bucket of its own, so that its shards are the same on other stages
};

// Buckets of at least `bucket_size` elements but for the last, of leaves in this order.
std::vector<BucketLayout> layout_buckets(const std::vector<LeafSize>& leaves,
                                         int ranks,
                                         std::int64_t bucket_size);

// The part of a slot that lies in [begin, end) of the buffer: empty if size <= 0.
BufferSlot intersect(const BufferSlot& slot, std::int64_t begin, std::int64_t end);

class Bucket {
 public:
  Bucket(BucketLayout layout,
         const models::ProcessGroup& group,
         at::Tensor params,
         at::Tensor grads);

  const std::vector<BufferSlot>& slots() const { return layout_.slots; }
  const at::Tensor& grads() const { return grads_; }  // [elements, with padding]

  // This rank's shard, in elements of the buffer and as memory: [elements/ranks].
  std::int64_t shard_begin() const;
  std::int64_t shard_end() const { return shard_begin() + shard_size(); }
  std::int64_t shard_size() const { return (layout_.end - layout_.begin) / group_->size(); }
  at::Tensor param_shard() const { return shard_of(params_); }
  at::Tensor grad_shard() const { return shard_of(grads_); }

  // The sum of all ranks' gradients, in the order of the ranks, into the shards.
  void start_grad_sync();
  void finish_grad_sync();
  // The shards' parameters to all ranks.
  void start_param_sync();
  void finish_param_sync();

 private:
  at::Tensor shard_of(const at::Tensor& whole) const;

  BucketLayout layout_;
  const models::ProcessGroup* group_;
  at::Tensor params_, grads_;
  bool reducing_ = false;
  models::Pending pending_;
};

class ParamAndGradBuffer {
 public:
  // Moves the leaves of `layout` into the buffer. All are of one dtype; the group outlives it.
  ParamAndGradBuffer(models::Parameters& parameters,
                     const std::vector<BucketLayout>& layout,
                     const models::ProcessGroup& group,
                     at::ScalarType grad_dtype);

  std::vector<Bucket>& buckets() { return buckets_; }
  const std::vector<Bucket>& buckets() const { return buckets_; }
  const models::ProcessGroup& group() const { return *group_; }
  models::Parameters& parameters() const { return *parameters_; }
  // The memory in which a leaf's gradient accumulates, of the leaf's shape.
  at::Tensor main_grad(const BufferSlot& slot) const;
  const at::Tensor& params() const { return params_; }  // [elements]
  const at::Tensor& grads() const { return grads_; }

 private:
  models::Parameters* parameters_;
  const models::ProcessGroup* group_;
  at::Tensor params_, grads_;
  std::vector<Bucket> buckets_;
};

}  // namespace ferry::trainer
