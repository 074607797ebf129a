// One side of a plan, built tensor by tensor, and the two sides that tests of plans begin with.
#pragma once

#include <fmt/format.h>

#include <string>
#include <utility>
#include <vector>

#include "distckpt/plan/copy_plan.h"

namespace ferry::distckpt::copy_plan_test {

struct Side {
  Layout layout{};
  TensorMap map{};

  std::uint32_t add(std::string name,
                    Shape shape,
                    std::vector<Shard> shards,
                    DType dtype = DType::kBF16) {
    return layout.add_tensor(
        {.name = std::move(name), .dtype = dtype, .shape = shape, .shards = std::move(shards)});
  }
  // A tensor in one file of its own, row-major.
  std::uint32_t add_whole(const std::string& name, Shape shape, DType dtype = DType::kBF16) {
    const auto storage =
        layout.add_storage(FileStorage{.path = name, .size = shape.product() * size_of(dtype)});
    return add(name, shape, {packed_shard(Box::whole(shape), dtype, storage, 0)}, dtype);
  }
  void link(std::uint32_t model,
            Box model_box,
            std::uint32_t stored,
            Box stored_box,
            int copy = 0,
            bool flat = false) {
    map.links.push_back({.model = model,
                         .model_box = model_box,
                         .stored = stored,
                         .stored_box = stored_box,
                         .copy = copy,
                         .flat = flat});
  }
  void link_whole(std::uint32_t model, std::uint32_t stored, int copy = 0) {
    const auto box = Box::whole(layout.tensor(stored).shape);
    link(model, box, stored, box, copy);
  }
  PlanSide side() const { return {.layout = &layout, .map = &map}; }
};

inline Box box(Dims offset, Dims size) {
  return {.offset = offset, .size = size};
}

constexpr std::int64_t kFfn = 8;
constexpr std::int64_t kHidden = 4;

// gate_proj and up_proj of Hugging Face.
inline std::vector<ModelTensor> gate_and_up() {
  return {{.name = "gate", .shape = {kFfn, kHidden}}, {.name = "up", .shape = {kFfn, kHidden}}};
}

inline Side gate_and_up_files() {
  Side side;
  side.link_whole(0, side.add_whole("gate", {kFfn, kHidden}));
  side.link_whole(1, side.add_whole("up", {kFfn, kHidden}));
  return side;
}

// linear_fc1 [gate; up] at TP4: rank t holds [gate_t; up_t].
inline Side fc1_at_tp4() {
  Side side;
  std::vector<Shard> shards;
  for (std::int64_t t = 0; t < 4; ++t) {
    const auto storage =
        side.layout.add_storage(FileStorage{.path = fmt::format("rank{}", t), .size = 64});
    for (std::int64_t half = 0; half < 2; ++half) {
      const auto rows = box({half * kFfn + t * 2, 0}, {2, kHidden});
      shards.push_back(packed_shard(rows, DType::kBF16, storage, half * 2 * kHidden * 2));
    }
  }
  const auto fc1 = side.add("linear_fc1", {2 * kFfn, kHidden}, std::move(shards));
  side.link(0, box({0, 0}, {kFfn, kHidden}), fc1, box({0, 0}, {kFfn, kHidden}));
  side.link(1, box({0, 0}, {kFfn, kHidden}), fc1, box({kFfn, 0}, {kFfn, kHidden}));
  return side;
}

}  // namespace ferry::distckpt::copy_plan_test
