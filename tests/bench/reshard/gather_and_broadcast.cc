#include "tests/bench/reshard/gather_and_broadcast.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "models/distributed/world.h"

namespace ferry {
namespace {

using distckpt::Box;
using models::MeshCoordinates;
using models::ParameterSpec;
using models::ProcessGroup;

// The boxes of a parameter and where its rows of each begin.
template <typename Body>
void for_each_box(const ParameterSpec& spec, const Body& body) {
  std::int64_t row = 0;
  for (const auto& box : spec.boxes) {
    body(box, row);
    row += box.size[0];
  }
}

at::Tensor part_of(at::Tensor value, std::int64_t row, const Box& held, const Box& wanted) {
  for (int d = 0; d < wanted.rank(); ++d)
    value = value.narrow(d, wanted.offset[d] - held.offset[d] + (d == 0 ? row : 0), wanted.size[d]);
  return value;
}

}  // namespace

GatherAndBroadcast::GatherAndBroadcast(models::World& world,
                                       const std::string& name,
                                       const models::TransformerConfig& config,
                                       const BenchMesh& source_mesh,
                                       const MeshWeights& source,
                                       const BenchMesh& target_mesh,
                                       const MeshWeights& target)
    : mesh_(source_mesh),
      source_(source),
      index_(source_mesh.index_of(world.rank())),
      device_(world.device()) {
  for (int rank = 0; rank < mesh_.shape.world_size(); ++rank)
    specs_.push_back(mesh_.specs(config, rank));
  for (const auto& parameter : target.all()) wanted_.emplace(parameter.spec.key, &parameter);
  const auto group = [&](const char* axis, std::vector<int> indices) {
    for (auto& index : indices) index = mesh_.ranks[static_cast<std::size_t>(index)];
    return ProcessGroup(world, name + "/" + axis, std::move(indices));
  };
  if (index_ >= 0) {
    const int of_stage = mesh_.shape.world_size() / mesh_.shape.pp();
    std::vector<int> stages;
    for (int stage = 0; stage < mesh_.shape.pp(); ++stage)
      stages.push_back(stage * of_stage + index_ % of_stage);
    stages_ = group("pp", stages);
    const int stage = mesh_.shape.coordinates(index_).pp;
    tensor_ = group("tp", gather_group(stage, false, index_));
    expert_ = group("ep", gather_group(stage, true, index_));
  }
  std::vector<int> others{mesh_.ranks[0]};
  for (const int rank : target_mesh.ranks) {
    if (mesh_.index_of(rank) < 0) others.push_back(rank);
  }
  std::ranges::sort(others);
  receives_ = index_ < 0 && std::ranges::count(others, world.rank()) > 0;
  sends_ = index_ == 0 && others.size() > 1;
  if (receives_ || sends_) others_ = ProcessGroup(world, name + "/others", others);
}

std::vector<int> GatherAndBroadcast::gather_group(int stage, bool expert, int like) const {
  const auto mine = mesh_.shape.coordinates(like);
  std::vector<int> indices;
  for (int index = 0; index < mesh_.shape.world_size(); ++index) {
    const auto at = mesh_.shape.coordinates(index);
    const bool same = expert ? at.edp == mine.edp : at.dp == mine.dp && at.cp == mine.cp;
    if (at.pp == stage && same) indices.push_back(index);
  }
  return indices;
}

void GatherAndBroadcast::run(std::int64_t bucket_bytes) {
  const int of_stage = mesh_.shape.world_size() / mesh_.shape.pp();
  std::map<std::tuple<int, bool, bool>, Bucket> filling;
  for (int stage = 0; stage < mesh_.shape.pp(); ++stage) {
    const auto& specs = specs_[static_cast<std::size_t>(stage * of_stage)];
    for (std::size_t i = 0; i < specs.size(); ++i) {
      const auto& spec = specs[i];
      if (spec.replica_id[0] != 0) continue;  // a tied embedding's copy
      const auto ranks = gather_group(stage, spec.expert, stage * of_stage).size();
      const bool gathered = spec.expert || spec.sharing == models::Sharing::kSharded;
      const auto most =
          bucket_bytes / size_of(spec.dtype) / static_cast<std::int64_t>(gathered ? ranks : 1);
      auto& bucket =
          filling
              .try_emplace({stage, spec.expert, gathered},
                           Bucket{.stage = stage, .expert = spec.expert, .gathered = gathered})
              .first->second;
      if (!bucket.parameters.empty() && bucket.elements + spec.shape.product() > most) {
        move(bucket);
        bucket.parameters.clear();
        bucket.elements = 0;
      }
      bucket.parameters.push_back(i);
      bucket.elements += spec.shape.product();
    }
  }
  for (const auto& [kind, bucket] : filling) move(bucket);
}

void GatherAndBroadcast::move(const Bucket& bucket) {
  at::Tensor gathered;
  const int of_stage = mesh_.shape.world_size() / mesh_.shape.pp();
  const auto ranks = bucket.gathered
                         ? gather_group(bucket.stage, bucket.expert, bucket.stage * of_stage).size()
                         : 1;
  const auto options = at::TensorOptions().dtype(at::kBFloat16).device(device_);
  if (index_ >= 0) {
    at::Tensor mine;
    if (mesh_.shape.coordinates(index_).pp != bucket.stage) {
      mine = at::empty({bucket.elements}, options);
    } else {
      std::vector<at::Tensor> parts;
      for (const auto i : bucket.parameters) parts.push_back(source_.all()[i].value.view({-1}));
      mine = parts.size() == 1 ? parts.front() : at::cat(parts);
    }
    mine = stages_.broadcast(mine, bucket.stage);
    gathered = !bucket.gathered ? mine : (bucket.expert ? expert_ : tensor_).all_gather(mine);
  } else if (receives_) {
    gathered = at::empty({static_cast<std::int64_t>(ranks) * bucket.elements}, options);
  }
  if (sends_ || receives_)
    gathered =
        others_.broadcast(gathered, others_.ranks()[0] == mesh_.ranks[0] ? 0 : others_.size() - 1);
  if (!wanted_.empty()) keep(bucket, gathered);
}

void GatherAndBroadcast::keep(const Bucket& bucket, const at::Tensor& gathered) {
  const int of_stage = mesh_.shape.world_size() / mesh_.shape.pp();
  auto ranks = gather_group(bucket.stage, bucket.expert,
                            bucket.stage * of_stage + (index_ < 0 ? 0 : index_ % of_stage));
  if (!bucket.gathered) ranks.resize(1);
  std::int64_t at = 0;
  for (const int rank : ranks) {
    for (const auto i : bucket.parameters) {
      const auto& spec = specs_[static_cast<std::size_t>(rank)][i];
      const auto value = gathered.narrow(0, at, spec.shape.product())
                             .view(at::IntArrayRef(spec.shape.begin(), spec.shape.end()));
      at += spec.shape.product();
      const auto found = wanted_.find(spec.key);
      if (found == wanted_.end()) continue;
      const auto& target = *found->second;
      const auto behind =
          target.spec.boxes.back().end(0) - spec.global_shape[0];  // padding that is wanted
      if (behind > 0)
        target.value
            .narrow(0, std::max<std::int64_t>(0, target.spec.shape[0] - behind),
                    std::min(behind, target.spec.shape[0]))
            .zero_();
      for_each_box(spec, [&](const Box& held, std::int64_t held_row) {
        for_each_box(target.spec, [&](const Box& wanted, std::int64_t wanted_row) {
          const auto common = intersect(held, wanted);
          if (common)
            part_of(target.value, wanted_row, wanted, *common)
                .copy_(part_of(value, held_row, held, *common));
        });
      });
    }
  }
}

}  // namespace ferry
