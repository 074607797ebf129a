#include "distckpt/plan/rank_plan.h"

#include <algorithm>
#include <map>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/plan/copy_plan.h"
#include "distckpt/plan/mesh_layout.h"

namespace ferry::distckpt {
namespace {

struct HeldBox {
  Box box{};
  ShardOfRank at{};
};

// One side: its layout, as one sees it who holds nothing, and who holds what of each tensor.
struct Side {
  explicit Side(const std::vector<std::vector<ShardedTensor>>& ranks) {
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      for (std::size_t i = 0; i < ranks[rank].size(); ++i) {
        const auto& tensor = ranks[rank][i];
        if (tensor.box().empty()) continue;
        held[tensor.key].push_back(
            {tensor.box(), {static_cast<int>(rank), static_cast<std::uint32_t>(i)}});
      }
    }
    auto with_onlooker = ranks;
    with_onlooker.emplace_back();
    mesh = make_mesh_layout(std::move(with_onlooker), static_cast<int>(ranks.size()), {});
  }

  // The shards that have all of a box.
  std::vector<ShardOfRank> holders(const std::string& key, const Box& box) const {
    std::vector<ShardOfRank> found;
    for (const auto& one : held.at(key)) {
      if (intersect(one.box, box) == box) found.push_back(one.at);
    }
    return found;
  }

  MeshLayout mesh{};
  std::map<std::string, std::vector<HeldBox>> held{};
};

// All of a tensor but what lies behind the other side's end.
void link(const TensorLayout& stored,
          std::uint32_t index,
          std::uint32_t model,
          const Shape& shape,
          TensorMap& map) {
  const auto common = Box::whole(shape);
  map.links.push_back({.model = model, .model_box = common, .stored = index, .stored_box = common});
  for (const auto& box : subtract(Box::whole(stored.shape), common))
    map.padding.push_back({.stored = index, .box = box});
}

Shape common_shape(const TensorLayout& a, const TensorLayout& b) {
  require(a.dtype == b.dtype && a.shape.rank() == b.shape.rank(), ErrorKind::kLayout,
          "{}: {} {} cannot become {} {}", a.name, short_name(a.dtype), to_string(a.shape),
          short_name(b.dtype), to_string(b.shape));
  auto shape = a.shape;
  bool shorter = false;
  bool longer = false;
  for (int d = 0; d < shape.rank(); ++d) {
    shorter = shorter || a.shape[d] < b.shape[d];
    longer = longer || a.shape[d] > b.shape[d];
    shape[d] = std::min(a.shape[d], b.shape[d]);
  }
  require(!(shorter && longer), ErrorKind::kLayout, "{}: {} and {} are padded in two ways", a.name,
          to_string(a.shape), to_string(b.shape));
  return shape;
}

// The rank's own memory, else one of the others in turn.
ShardOfRank choose(const std::vector<ShardOfRank>& sources, int target) {
  const auto own = std::ranges::find(sources, target, &ShardOfRank::rank);
  return own != sources.end() ? *own : sources[static_cast<std::size_t>(target) % sources.size()];
}

}  // namespace

RankPlan plan_between_ranks(const std::vector<std::vector<ShardedTensor>>& sources,
                            const std::vector<std::vector<ShardedTensor>>& targets) {
  const Side source(sources);
  const Side target(targets);
  std::vector<ModelTensor> tensors;
  TensorMap source_map;
  TensorMap target_map;
  RankPlan plan;
  for (std::uint32_t i = 0; i < source.mesh.layout.tensors().size(); ++i) {
    const auto& stored = source.mesh.layout.tensor(i);
    const auto wanted = target.mesh.layout.find(stored.name);
    require(wanted.has_value(), ErrorKind::kLayout, "{}: held, but nobody wants it", stored.name);
    const auto shape = common_shape(stored, target.mesh.layout.tensor(*wanted));
    const auto model = static_cast<std::uint32_t>(tensors.size());
    tensors.push_back({.name = stored.name, .dtype = stored.dtype, .shape = shape});
    plan.names.push_back(stored.name);
    link(stored, i, model, shape, source_map);
    link(target.mesh.layout.tensor(*wanted), *wanted, model, shape, target_map);
  }
  for (const auto& wanted : target.mesh.layout.tensors()) {
    require(source.mesh.layout.find(wanted.name).has_value(), ErrorKind::kLayout,
            "{}: wanted, but nobody holds it", wanted.name);
  }
  const auto copies =
      plan_copy(tensors, {&source.mesh.layout, &source_map}, {&target.mesh.layout, &target_map});
  for (std::uint32_t i = 0; i < copies.tensors.size(); ++i) {
    const auto& planned = copies.tensors[i];  // in the order of `tensors`
    for (const auto& op : copy_ops(planned)) {
      const auto from = source.holders(planned.tensor.name, op.box);
      for (const auto& to : target.holders(planned.tensor.name, op.box)) {
        plan.copies.push_back({.tensor = i,
                               .box = op.box,
                               .source = choose(from, to.rank),
                               .target = to,
                               .dtype = op.dtype});
      }
    }
  }
  for (const auto& fill : copies.fills) {
    const auto name = *source.mesh.layout.find(fill.tensor);
    for (const auto& one : target.held.at(fill.tensor)) {
      const auto part = intersect(one.box, fill.box);
      if (part) plan.fills.push_back({.tensor = name, .box = *part, .target = one.at});
    }
  }
  return plan;
}

}  // namespace ferry::distckpt
