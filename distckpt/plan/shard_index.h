// The shards of a tensor that hold a box of it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "distckpt/base/box.h"
#include "distckpt/plan/layout.h"

namespace ferry::distckpt {

// Finds the shards of one tensor, which outlives it, that meet a box. Checkpoints have thousands of
// shards that are one layer or one expert thick: they are sorted, and a box of one layer and expert
// looks only at that layer's and expert's.
class ShardIndex {
 public:
  explicit ShardIndex(const TensorLayout& tensor) : tensor_(&tensor) {
    order_.resize(tensor.shards.size());
    std::iota(order_.begin(), order_.end(), 0U);
    std::ranges::sort(order_, {}, [&](std::uint32_t i) { return tensor.shards[i].box.offset; });
    thin_dims_ = tensor.shape.rank();
    for (const auto& shard : tensor.shards) {
      int thin = 0;
      while (thin < thin_dims_ && shard.box.size[thin] == 1) ++thin;
      thin_dims_ = thin;
    }
  }

  template <typename Visit>
  void visit(const Box& box, Visit&& visit) const {
    int fixed = 0;
    while (fixed < thin_dims_ && box.size[fixed] == 1) ++fixed;
    const auto prefix = [&](const Dims& offset) {
      return Dims(std::span(offset.begin(), static_cast<std::size_t>(fixed)));
    };
    const auto range = std::ranges::equal_range(
        order_, prefix(box.offset), {},
        [&](std::uint32_t i) { return prefix(tensor_->shards[i].box.offset); });
    for (const auto i : range) {
      const auto& shard = tensor_->shards[i];
      if (const auto both = intersect(shard.box, box)) visit(shard, *both);
    }
  }

 private:
  const TensorLayout* tensor_;
  std::vector<std::uint32_t> order_;
  int thin_dims_ = 0;  // leading dimensions in which every shard has size one
};

}  // namespace ferry::distckpt
