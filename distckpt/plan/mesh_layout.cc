#include "distckpt/plan/mesh_layout.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/plan/box_io.h"
#include "distckpt/plan/coverage.h"
#include "distckpt/plan/sharded_tensor_codec.h"

namespace ferry::distckpt {
namespace {

// A shard of some rank.
struct Held {
  Box box{};
  int rank = 0;
  bool main = false;
  Placement at{};
};

// Bytes from one element to the next, of all dimensions of the global tensor.
Dims strides_in_bytes(const LocalShard& shard) {
  const auto& local = shard.tensor.local_shape;
  auto strides = shard.byte_strides();
  require(strides.rank() == local.rank(), ErrorKind::kUsage, "{}: {} strides of {} dimensions",
          shard.tensor.key, strides.rank(), local.rank());
  for (int i = 0; i < shard.tensor.prepend_axis_num; ++i) strides.push_front(0);
  return strides;
}

// Dimensions from the innermost out: each lies beyond all that it holds.
void require_distinct_elements(const LocalShard& shard) {
  const auto& size = shard.tensor.local_shape;
  const auto strides = shard.strides.empty() ? row_major_strides(size) : shard.strides;
  std::vector<int> order;
  for (int d = 0; d < size.rank(); ++d) {
    if (size[d] > 1) order.push_back(d);
  }
  std::ranges::sort(order, {}, [&](int d) { return strides[d]; });
  std::int64_t reach = 1;
  for (const int d : order) {
    require(strides[d] >= reach, ErrorKind::kUsage,
            "{}: strides {} of {} lay two elements on one place", shard.tensor.key,
            to_string(strides), to_string(size));
    reach += (size[d] - 1) * strides[d];
  }
}

MemoryStorage memory_of(const LocalShard& shard) {
  const auto& size = shard.tensor.local_shape;
  MemoryStorage memory{.data = shard.data, .device = shard.device, .owner = shard.owner};
  if (size.product() == 0) return memory;
  require(shard.data != nullptr, ErrorKind::kUsage, "{}: no memory holds it", shard.tensor.key);
  require_distinct_elements(shard);
  memory.size = fold_runs({.at = {.strides = strides_in_bytes(shard)},
                           .size = shard.tensor.box().size,
                           .element_size = size_of(shard.tensor.dtype)})
                    .end();
  return memory;
}

std::string ranks_of(const std::vector<const Held*>& held) {
  std::string text = held.size() == 1 ? "rank" : "ranks";
  for (std::size_t i = 0; i < held.size(); ++i)
    text += fmt::format("{} {}", i == 0 ? "" : " and", held[i]->rank);
  return text;
}

std::vector<ShardedTensor> tensors_of(const std::vector<LocalShard>& shards) {
  std::vector<ShardedTensor> tensors;
  tensors.reserve(shards.size());
  for (const auto& shard : shards) tensors.push_back(shard.tensor);
  return tensors;
}

class MeshLayoutBuilder {
 public:
  explicit MeshLayoutBuilder(MeshLayout& mesh) : mesh_(mesh) {}

  void build() {
    const auto count = mesh_.ranks.size();
    for (std::size_t rank = 0; rank < count; ++rank) {
      mesh_.layout.add_storage(RankStorage{.rank = static_cast<int>(rank)});
    }
    for (const auto& shard : mesh_.shards) mesh_.layout.add_storage(memory_of(shard));
    for (std::size_t rank = 0; rank < count; ++rank) add_rank(static_cast<int>(rank));
    for (std::uint32_t i = 0; i < held_.size(); ++i) place(mesh_.layout.tensor(i), held_[i]);
  }

 private:
  void add_rank(int rank) {
    const auto& tensors = mesh_.ranks[static_cast<std::size_t>(rank)];
    std::int64_t position = 0;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto& tensor = tensors[i];
      tensor.validate();
      require(!tensor.flattened_range, ErrorKind::kLayout,
              "{}: rank {} holds a flattened range of it", tensor.key, rank);
      const auto box = tensor.box();
      const auto index = index_of(tensor, rank);
      if (box.empty()) continue;
      auto shard = packed_shard(box, tensor.dtype, static_cast<StorageId>(rank), position);
      position += box.volume() * size_of(tensor.dtype);
      if (rank == mesh_.rank) {
        shard.at = {.storage = static_cast<StorageId>(mesh_.ranks.size() + i),
                    .offset = 0,
                    .strides = strides_in_bytes(mesh_.shards[i])};
      }
      held_[index].push_back(
          {.box = box, .rank = rank, .main = tensor.is_main_replica(), .at = shard.at});
    }
    auto& storage = std::get<RankStorage>(mesh_.layout.storage(static_cast<StorageId>(rank)));
    storage.size = position;
  }

  std::uint32_t index_of(const ShardedTensor& tensor, int rank) {
    if (const auto known = mesh_.layout.find(tensor.key)) {
      const auto& layout = mesh_.layout.tensor(*known);
      require(layout.dtype == tensor.dtype && layout.shape == tensor.global_shape,
              ErrorKind::kLayout, "{}: {} {} on rank {}, but {} {} on rank {}", tensor.key,
              short_name(tensor.dtype), to_string(tensor.global_shape), rank,
              short_name(layout.dtype), to_string(layout.shape), first_rank_[*known]);
      return *known;
    }
    held_.emplace_back();
    first_rank_.push_back(rank);
    return mesh_.layout.add_tensor(
        {.name = tensor.key, .dtype = tensor.dtype, .shape = tensor.global_shape, .shards = {}});
  }

  // Replicas of one box become one shard.
  void place(TensorLayout& tensor, std::vector<Held>& held) const {
    std::ranges::stable_sort(
        held, {}, [](const Held& one) { return std::pair(one.box.offset, one.box.size); });
    std::vector<Box> boxes;
    for (std::size_t begin = 0; begin < held.size();) {
      std::vector<const Held*> mains;
      std::vector<const Held*> all;
      for (auto at = begin; at < held.size() && held[at].box == held[begin].box; ++at) {
        all.push_back(&held[at]);
        if (held[at].main) mains.push_back(&held[at]);
      }
      begin += all.size();
      const auto name = [&] {
        return fmt::format("{} {}", tensor.name, to_string(all.front()->box));
      };
      for (std::size_t i = 1; i < all.size(); ++i) {
        require(all[i]->rank != all[i - 1]->rank, ErrorKind::kLayout, "{}: rank {} holds it twice",
                name(), all[i]->rank);
      }
      require(!mains.empty(), ErrorKind::kLayout, "{}: {} holds it, but none as the main replica",
              name(), ranks_of(all));
      require(mains.size() == 1, ErrorKind::kLayout, "{}: {} hold it as the main replica", name(),
              ranks_of(mains));
      const auto mine = std::ranges::find(all, mesh_.rank, &Held::rank);
      const auto* const from = mine != all.end() ? *mine : mains.front();
      tensor.shards.push_back({.box = from->box, .at = from->at});
      boxes.push_back(from->box);
    }
    require_exactly_once(tensor.name, tensor.shape, boxes, "held");
  }

  MeshLayout& mesh_;
  std::vector<std::vector<Held>> held_;  // per tensor of the layout
  std::vector<int> first_rank_;
};

}  // namespace

MeshLayout make_mesh_layout(std::vector<std::vector<ShardedTensor>> ranks,
                            int rank,
                            std::vector<LocalShard> mine) {
  MeshLayout mesh{.rank = rank, .ranks = std::move(ranks), .shards = std::move(mine)};
  mesh.ranks.at(static_cast<std::size_t>(rank)) = tensors_of(mesh.shards);
  MeshLayoutBuilder(mesh).build();
  return mesh;
}

MeshLayout gather_mesh_layout(const RankGroup& group, std::vector<LocalShard> mine) {
  std::string bytes;
  run_together(group, [&] { bytes = encode_sharded_tensors(tensors_of(mine)); });
  const auto all = group.gather(bytes);
  MeshLayout mesh;
  run_together(group,
               [&] { mesh = make_mesh_layout(decode_ranks(all), group.rank, std::move(mine)); });
  return mesh;
}

CopyPlan part_of_rank(CopyPlan plan, const MeshLayout& mesh) {
  std::vector<std::int64_t> written(mesh.shards.size(), 0);  // elements
  const auto count = [&](const Placement& at, const Box& box) {
    written[at.storage - mesh.ranks.size()] += box.volume();
  };
  auto mine =
      keep_targets(std::move(plan), [&](StorageId storage) { return mesh.is_mine(storage); });
  for (const auto& planned : mine.tensors) {
    for (const auto& cover : planned.targets) {
      for (const auto& piece : cover) count(piece.at, piece.box);
    }
  }
  for (const auto& fill : mine.fills) count(fill.at, fill.box);
  for (std::size_t i = 0; i < written.size(); ++i) {
    const auto& tensor = mesh.shards[i].tensor;
    require(written[i] == tensor.local_shape.product(), ErrorKind::kLayout,
            "{} {}: {} of its {} elements would be written", tensor.key, to_string(tensor.box()),
            written[i], tensor.local_shape.product());
  }
  std::size_t index = 0;
  std::erase_if(mine.discards, [&](const Padding&) {
    return index++ % mesh.ranks.size() != static_cast<std::size_t>(mesh.rank);
  });
  return mine;
}

}  // namespace ferry::distckpt
