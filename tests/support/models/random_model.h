// A model of random tensors in two random layouts in memory, and what a copy from one to the other
// must give, worked out element by element without the planner.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "distckpt/plan/copy_plan.h"
#include "distckpt/plan/layout.h"
#include "distckpt/plan/tensor_map.h"

namespace ferry::support {

struct ModelSide {
  distckpt::Layout layout;
  distckpt::TensorMap map;
  std::vector<std::vector<std::byte>> memory;  // what the layout's storages name

  distckpt::PlanSide plan_side() const { return {.layout = &layout, .map = &map}; }
};

struct RandomModelOptions {
  int num_tensors = 4;
  bool large = false;  // one tensor is longer than an executor's task and its blocks of digests
};

struct RandomModel {
  std::vector<distckpt::ModelTensor> tensors{};
  std::vector<std::vector<std::byte>> bytes{};  // of each tensor, row-major
  distckpt::Transform cast = distckpt::Transform::kCastExact;
  ModelSide source{};                              // holds the tensors
  ModelSide target{};                              // holds kUntouched everywhere
  std::vector<std::vector<std::byte>> expected{};  // target.memory after the copy
  bool padding_is_zero = true;                     // the source's
};

inline constexpr std::byte kUntouched{0xA5};

// Tensors of rank 0 to 4, empty ones too, of every size of element. On either side they are cut,
// stacked, transposed, padded, flattened into buckets with gaps, widened, held twice, and parts
// that take turns are held apart; the shards lie with strides in any order, with gaps, in several
// storages.
RandomModel random_model(std::uint64_t seed, const RandomModelOptions& options = {});

}  // namespace ferry::support
