#include "trainer/optimizer/param_and_grad_buffer.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"

namespace ferry::trainer {
std::vector<BucketLayout> layout_buckets(const std::vector<LeafSize>& leaves,
                                         int ranks,
                                         std::int64_t bucket_size) {
  std::vector<BucketLayout> buckets;
  std::int64_t at = 0;
  const auto close = [&] {
    if (buckets.empty() || buckets.back().end != 0) return;
    auto& last = buckets.back();
    last.end = at = last.begin + distckpt::round_up(at - last.begin, ranks * kBlock);
  };
  for (const auto& leaf : leaves) {
    if (leaf.alone) close();
    if (buckets.empty() || buckets.back().end != 0) buckets.push_back({.begin = at});
    auto& bucket = buckets.back();
    at = distckpt::round_up(at, kBlock);
    bucket.slots.push_back({.leaf = leaf.leaf, .begin = at, .size = leaf.size});
    at += leaf.size;
    if (leaf.alone || at - bucket.begin >= bucket_size) close();
  }
  close();
  return buckets;
}

BufferSlot intersect(const BufferSlot& slot, std::int64_t begin, std::int64_t end) {
  const auto first = std::max(slot.begin, begin);
  return {.leaf = slot.leaf, .begin = first, .size = std::min(slot.begin + slot.size, end) - first};
}

Bucket::Bucket(BucketLayout layout,
               const models::ProcessGroup& group,
               at::Tensor params,
               at::Tensor grads)
    : layout_(std::move(layout)),
      group_(&group),
      params_(std::move(params)),
      grads_(std::move(grads)) {}

std::int64_t Bucket::shard_begin() const {
  return layout_.begin + group_->rank() * shard_size();
}

at::Tensor Bucket::shard_of(const at::Tensor& whole) const {
  return whole.narrow(0, group_->rank() * shard_size(), shard_size());
}

void Bucket::start_grad_sync() {
  require(!reducing_, ErrorKind::kBug, "a bucket's gradients are summed twice");
  reducing_ = true;
  pending_ = group_->reduce_scatter_in_place(grads_);
}

void Bucket::finish_grad_sync() {
  if (!reducing_) start_grad_sync();
  pending_.wait();
  reducing_ = false;
}

void Bucket::start_param_sync() {
  pending_ = group_->all_gather_in_place(params_);
}

void Bucket::finish_param_sync() {
  pending_.wait();
}

ParamAndGradBuffer::ParamAndGradBuffer(models::Parameters& parameters,
                                       const std::vector<BucketLayout>& layout,
                                       const models::ProcessGroup& group,
                                       at::ScalarType grad_dtype)
    : parameters_(&parameters), group_(&group) {
  require(!layout.empty(), ErrorKind::kBug, "a buffer without parameters");
  const auto& first = parameters.leaves()[layout.front().slots.front().leaf].value;
  const auto options = first.options().requires_grad(false);
  params_ = at::zeros({layout.back().end}, options);
  grads_ = at::zeros({layout.back().end}, options.dtype(grad_dtype));
  for (const auto& bucket : layout) {
    const auto size = bucket.end - bucket.begin;
    buckets_.emplace_back(bucket, group, params_.narrow(0, bucket.begin, size),
                          grads_.narrow(0, bucket.begin, size));
    for (const auto& slot : bucket.slots)
      parameters.rebind(slot.leaf, params_.narrow(0, slot.begin, slot.size));
  }
}

at::Tensor ParamAndGradBuffer::main_grad(const BufferSlot& slot) const {
  return grads_.narrow(0, slot.begin, slot.size)
      .view(parameters_->leaves()[slot.leaf].value.sizes());
}

}  // namespace ferry::trainer
