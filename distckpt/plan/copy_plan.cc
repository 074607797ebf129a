#include "distckpt/plan/copy_plan.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "distckpt/elements/cast.h"
#include "distckpt/elements/dequantize.h"
#include "distckpt/plan/coverage.h"
#include "distckpt/plan/shard_index.h"

namespace ferry::distckpt {
namespace {

std::int64_t address(const Placement& at, const Dims& from) {
  std::int64_t offset = at.offset;
  for (int d = 0; d < from.rank(); ++d) offset += from[d] * at.strides[d];
  return offset;
}

Dims minus(const Dims& a, const Dims& b) {
  Dims result = a;
  for (int d = 0; d < a.rank(); ++d) result[d] -= b[d];
  return result;
}

// Strides of the stored dimensions, for the dimensions of the model tensor: aligned at the last
// one.
Dims align_strides(const Dims& strides, int rank) {
  Dims aligned = Dims::filled(rank, 0);
  for (int d = 1; d <= std::min(rank, strides.rank()); ++d) {
    aligned[rank - d] = strides[strides.rank() - d];
  }
  return aligned;
}

// The dimension of the stored box that `axis` of the model's box is; nothing for one of size one
// that it is not.
std::optional<int> stored_dim(const BoxLink& link, int axis) {
  const auto& axes = link.axes;
  for (int i = 0; i < axes.rank(); ++i) {
    if (axes[i] == axis) return link.stored_box.rank() - axes.rank() + i;
  }
  return std::nullopt;
}

// The elements that one of the stored tensor packs.
std::int64_t pack_of(const BoxLink& link, const TensorMap& map) {
  return link.scale < 0 ? 1 : pack_size(map.scales[static_cast<std::size_t>(link.scale)].encoding);
}

// The part `part` of the stored box as a part of the model's box, whose dimensions lie in another
// order.
Piece permuted_piece(const BoxLink& link, std::int64_t pack, const Shard& shard, const Box& part) {
  Piece piece{.box = link.model_box, .at = {.strides = Dims::filled(link.model_box.rank(), 0)}};
  for (int axis = 0; axis < link.model_box.rank(); ++axis) {
    const auto dim = stored_dim(link, axis);
    if (!dim) continue;
    const auto count = *dim == part.rank() - 1 ? pack : 1;
    piece.box.offset[axis] += (part.offset[*dim] - link.stored_box.offset[*dim]) * count;
    piece.box.size[axis] = part.size[*dim] * count;
    piece.at.strides[axis] = shard.at.strides[*dim];
  }
  return piece;
}

// Adds a piece whose box is in the tensor's shape, as pieces of its grid.
void append_in_grid(const ModelTensor& model, const Piece& piece, Cover& cover) {
  const int last = piece.box.rank() - 1;
  if (piece.box.rank() == model.grid().rank()) {
    cover.push_back(piece);
    return;
  }
  const auto count = model.interleaved;
  const auto begin = piece.box.offset[last];
  const auto stride = piece.at.strides[last];
  for (const auto& flat :
       split_flat_range({model.shape[last] / count, count}, begin, piece.box.end(last))) {
    auto part = piece;
    part.box.offset[last] = flat.box.offset[0];
    part.box.offset.push_back(flat.box.offset[1]);
    part.box.size[last] = flat.box.size[0];
    part.box.size.push_back(flat.box.size[1]);
    part.at.offset += (flat.begin - begin) * stride;
    part.at.strides[last] = stride * count;
    part.at.strides.push_back(stride);
    cover.push_back(part);
  }
}

void append_pieces(const BoxLink& link,
                   std::int64_t pack,
                   const ModelTensor& model,
                   const TensorLayout& stored,
                   const ShardIndex& index,
                   Cover& cover) {
  const int rank = link.model_box.rank();
  index.visit(link.stored_box, [&](const Shard& shard, const Box& part) {
    const auto first = address(shard.at, minus(part.offset, shard.box.offset));
    if (!link.flat) {
      Piece piece{.box = {}, .at = {.strides = align_strides(shard.at.strides, rank)}};
      if (link.axes.empty()) {
        piece.box = translate(part, link.stored_box, link.model_box);
      } else {
        piece = permuted_piece(link, pack, shard, part);
      }
      piece.at.storage = shard.at.storage;
      piece.at.offset = first;
      piece.dtype = stored.dtype;
      piece.scale = link.scale;
      piece.less = link.less;
      append_in_grid(model, piece, cover);
      return;
    }
    const int last = part.rank() - 1;
    const auto stride = shard.at.strides[last];
    const auto begin = part.offset[last] - link.stored_box.offset[last];
    for (const auto& piece :
         split_flat_range(link.model_box.size, begin, begin + part.size[last])) {
      Box box = piece.box;
      for (int d = 0; d < rank; ++d) box.offset[d] += link.model_box.offset[d];
      append_in_grid(model,
                     {.box = box,
                      .at = {.storage = shard.at.storage,
                             .offset = first + (piece.begin - begin) * stride,
                             .strides = byte_strides(link.model_box.size, stride)},
                      .dtype = stored.dtype,
                      .scale = link.scale,
                      .less = link.less},
                     cover);
    }
  });
}

// True if the axes name each dimension of the model's box that is longer than one exactly once, in
// the length that the stored box has.
bool axes_fit(const BoxLink& link, std::int64_t pack) {
  const auto& axes = link.axes;
  const auto& size = link.stored_box.size;
  const int leading = size.rank() - axes.rank();
  if (leading < 0) return false;
  for (int d = 0; d < leading; ++d) {
    if (size[d] != 1) return false;
  }
  auto left = link.model_box.size;  // of each dimension what no axis has named
  for (int i = 0; i < axes.rank(); ++i) {
    if (axes[i] < 0 || axes[i] >= left.rank()) return false;
    auto& extent = left[static_cast<int>(axes[i])];
    const auto stored = size[leading + i] * (i + 1 == axes.rank() ? pack : 1);
    if (extent != stored) return false;
    extent = stored == 1 ? 1 : -1;
  }
  return std::ranges::all_of(left, [](auto extent) { return extent == 1 || extent == -1; });
}

// A model of many experts has hundreds of thousands of links: what a message shows is formatted
// where there is one.
void check_link(const BoxLink& link,
                std::int64_t pack,
                const TensorMap& map,
                const ModelTensor& model,
                const TensorLayout& stored) {
  const bool has_parts =
      model.interleaved == 1 || (model.interleaved > 1 && !model.shape.empty() &&
                                 model.shape[model.shape.rank() - 1] % model.interleaved == 0);
  if (!has_parts) {
    fail(ErrorKind::kLayout, "{}: shape {} has no {} parts that take turns", model.name,
         to_string(model.shape), model.interleaved);
  }
  const auto grid = model.grid();
  const auto& space = link.model_box.rank() == grid.rank() ? grid : model.shape;
  if (!link.model_box.inside(space)) {
    fail(ErrorKind::kLayout, "{}: {} leaves its shape {}", model.name, to_string(link.model_box),
         to_string(space));
  }
  if (!link.stored_box.inside(stored.shape)) {
    fail(ErrorKind::kLayout, "{}: {} of it (for {}) leaves its shape {}", stored.name,
         to_string(link.stored_box), model.name, to_string(stored.shape));
  }
  const bool readable =
      link.scale >= 0
          ? holds(stored.dtype, map.scales[static_cast<std::size_t>(link.scale)].encoding) &&
                can_cast(DType::kF32, model.dtype)
          : stored.dtype == model.dtype || can_cast(stored.dtype, model.dtype);
  require(readable, ErrorKind::kLayout, "{}: {} cannot be converted to {} ({})", stored.name,
          short_name(stored.dtype), short_name(model.dtype), model.name);
  const auto& size = link.stored_box.size;
  const bool fits = link.flat
                        ? link.stored_box.volume() == link.model_box.volume() && size.rank() > 0 &&
                              size[size.rank() - 1] == link.stored_box.volume()
                    : link.axes.empty() ? pack == 1 && same_extents(link.model_box.size, size)
                                        : axes_fit(link, pack);
  if (!fits) {
    fail(ErrorKind::kLayout, "{} {} cannot be {} {}", stored.name, to_string(link.stored_box),
         model.name, to_string(link.model_box));
  }
}

// Every scale belongs to one tensor, whole, and there is one for each of its blocks.
void check_scales(const PlanSide& side) {
  const auto& layout = *side.layout;
  const auto& map = *side.map;
  std::vector<int> uses(map.scales.size(), 0);
  for (const auto& link : map.links) {
    if (link.scale < 0) continue;
    const auto& scale = map.scales.at(static_cast<std::size_t>(link.scale));
    const auto& stored = layout.tensor(link.stored);
    const auto& scales = layout.tensor(scale.stored);
    const auto file =
        scales.shards.empty()
            ? ""
            : fmt::format(" ({})", describe(layout.storages()[scales.shards.front().at.storage]));
    Shape blocks = stored.shape;
    blocks[blocks.rank() - 1] *= pack_of(link, map);
    require(scale.block.rank() == blocks.rank(), ErrorKind::kLayout,
            "{}: blocks of {} do not fit its shape {}", stored.name, to_string(scale.block),
            to_string(stored.shape));
    for (int d = 0; d < blocks.rank(); ++d) blocks[d] = ceil_div(blocks[d], scale.block[d]);
    require(is_scale(scales.dtype), ErrorKind::kLayout, "{}: scales of {} are not read{}",
            scales.name, short_name(scales.dtype), file);
    const bool single =
        scales.shape.rank() <= 1 && scales.shape.product() == 1 && blocks.product() == 1;
    require(single || scales.shape == blocks, ErrorKind::kLayout,
            "{}: has shape {}, expected {} for the {} blocks of {}, whose shape is {}{}",
            scales.name, to_string(scales.shape), to_string(blocks), to_string(scale.block),
            stored.name, to_string(stored.shape), file);
    if (scale.how != GlobalScale::kNone) {
      const auto& global = layout.tensor(scale.global);
      require(global.dtype == DType::kF32 && global.shape.product() == 1, ErrorKind::kLayout,
              "{}: is {} {}, expected one element of f32, the scale of {}{}", global.name,
              short_name(global.dtype), to_string(global.shape), stored.name, file);
    }
    require(link.stored_box == Box::whole(stored.shape), ErrorKind::kLayout,
            "{}: {} has scales, but is linked only in part", stored.name,
            to_string(link.stored_box));
    ++uses[static_cast<std::size_t>(link.scale)];
  }
  for (std::size_t i = 0; i < uses.size(); ++i) {
    require(uses[i] == 1, ErrorKind::kLayout, "{}: are the scales of {} tensors, expected one",
            layout.tensor(map.scales[i].stored).name, uses[i]);
  }
}

struct SidePlan {
  std::vector<std::vector<Cover>> covers;  // per model tensor, per copy
  std::vector<Padding> padding;
};

// The pieces in which one side holds each model tensor, after checking that side for "exactly once"
// in both directions.
SidePlan plan_side(const std::vector<ModelTensor>& tensors,
                   const PlanSide& side,
                   std::string_view verb) {
  const auto& layout = *side.layout;
  const auto& map = *side.map;
  check_layout(layout);
  check_scales(side);

  std::vector<std::vector<Box>> used(layout.tensors().size());
  SidePlan plan;
  plan.covers.resize(tensors.size());
  std::vector<std::uint32_t> by_stored(map.links.size());
  std::iota(by_stored.begin(), by_stored.end(), 0U);
  std::ranges::stable_sort(by_stored, {}, [&](std::uint32_t i) { return map.links[i].stored; });

  const auto shard_boxes = [&](std::uint32_t stored) {
    return [&map, stored](std::uint32_t i) { return map.links[i].stored == stored; };
  };
  for (auto at = by_stored.begin(); at != by_stored.end();) {
    const auto stored_index = map.links[*at].stored;
    const auto& stored = layout.tensor(stored_index);
    const ShardIndex index(stored);
    const auto end = std::find_if_not(at, by_stored.end(), shard_boxes(stored_index));
    for (; at != end; ++at) {
      const auto& link = map.links[*at];
      const auto& model = tensors.at(link.model);
      const auto pack = pack_of(link, map);
      check_link(link, pack, map, model, stored);
      auto& covers = plan.covers[link.model];
      if (covers.size() <= static_cast<std::size_t>(link.copy)) {
        covers.resize(static_cast<std::size_t>(link.copy) + 1);
      }
      append_pieces(link, pack, model, stored, index, covers[static_cast<std::size_t>(link.copy)]);
      used[stored_index].push_back(link.stored_box);
    }
  }

  for (const auto& padding : map.padding) {
    const auto& stored = layout.tensor(padding.stored);
    used[padding.stored].push_back(padding.box);
    require(padding.box.inside(stored.shape), ErrorKind::kLayout, "{}: padding {} leaves its shape",
            stored.name, to_string(padding.box));
    ShardIndex(stored).visit(padding.box, [&](const Shard& shard, const Box& part) {
      plan.padding.push_back(
          {.tensor = stored.name,
           .box = part,
           .at = {.storage = shard.at.storage,
                  .offset = address(shard.at, minus(part.offset, shard.box.offset)),
                  .strides = shard.at.strides},
           .dtype = stored.dtype,
           .ones = padding.ones});
    });
  }
  for (const auto& box : map.left_out) used[box.stored].push_back(box.box);
  for (const auto& scale : map.scales) {  // auxiliary: used whole by the tensor it scales
    used[scale.stored].push_back(Box::whole(layout.tensor(scale.stored).shape));
    if (scale.how != GlobalScale::kNone)
      used[scale.global].push_back(Box::whole(layout.tensor(scale.global).shape));
  }
  for (std::uint32_t i = 0; i < layout.tensors().size(); ++i) {
    const auto& stored = layout.tensor(i);
    require_exactly_once(stored.name, stored.shape, used[i], verb);
  }

  std::vector<Box> boxes;
  for (std::size_t m = 0; m < tensors.size(); ++m) {
    require(!plan.covers[m].empty() || tensors[m].num_bytes() == 0, ErrorKind::kLayout,
            "{}: no part of it is {}", tensors[m].name, verb);
    for (auto& cover : plan.covers[m]) {
      boxes.clear();
      for (const auto& piece : cover) boxes.push_back(piece.box);
      require_exactly_once(tensors[m].name, tensors[m].grid(), boxes, verb);
      std::ranges::sort(cover, {}, [](const Piece& piece) { return piece.box.offset; });
    }
  }
  return plan;
}

// The way in which a piece's elements become the model tensor's; `cast` is for another dtype's.
Transform transform_of(const Piece& piece, const ModelTensor& tensor, Transform cast) {
  if (piece.scale >= 0) return Transform::kDequantize;
  return piece.dtype == tensor.dtype ? Transform::kNone : cast;
}

// The one that some piece of the source or of a replica needs.
Transform transform_on_read(const PlannedTensor& planned, Transform cast) {
  auto transform = Transform::kNone;
  const auto look = [&](const Cover& cover) {
    for (const auto& piece : cover) {
      if (transform == Transform::kDequantize) return;
      const auto needed = transform_of(piece, planned.tensor, cast);
      if (needed != Transform::kNone) transform = needed;
    }
  };
  look(planned.source);
  for (const auto& cover : planned.replicas) look(cover);
  return transform;
}

// Sets PlannedTensor::less.
void settle_less(PlannedTensor& planned) {
  std::optional<int> common;
  bool same = true;
  const auto look = [&](const Cover& cover) {
    for (const auto& piece : cover) {
      if (!common) common = piece.less;
      same = same && *common == piece.less;
    }
  };
  look(planned.source);
  for (const auto& cover : planned.replicas) look(cover);
  for (const auto& cover : planned.targets) look(cover);
  planned.less = same ? common.value_or(0) : 0;
}

// The place of a tensor that is whole in one packed shard.
Placement place_of_scales(const TensorLayout& stored) {
  require(stored.shards.size() == 1, ErrorKind::kLayout,
          "{}: scales that lie in {} parts are not handled", stored.name, stored.shards.size());
  return stored.shards.front().at;
}

// Resolves each scaled link, which is of a whole tensor, to the scales of its blocks.
void plan_scales(const std::vector<ModelTensor>& tensors, const PlanSide& source, CopyPlan& plan) {
  plan.scales.resize(source.map->scales.size());
  for (const auto& link : source.map->links) {
    if (link.scale < 0) continue;
    const auto& scale = source.map->scales[static_cast<std::size_t>(link.scale)];
    const auto& stored = source.layout->tensor(scale.stored);
    const auto& model = tensors.at(link.model);
    const auto at = place_of_scales(stored);
    const int last = link.model_box.rank() - 1;
    ScalePiece piece{
        .at = at, .dtype = stored.dtype, .block = {}, .encoding = scale.encoding, .how = scale.how};
    if (scale.how != GlobalScale::kNone)
      piece.global = place_of_scales(source.layout->tensor(scale.global));
    piece.at.strides = {};
    for (int axis = 0; axis <= last; ++axis) {
      const auto dim = link.axes.empty() ? axis : stored_dim(link, axis).value_or(-1);
      piece.block.push_back(dim < 0 ? 1 : scale.block[dim]);
      piece.at.strides.push_back(dim < 0 || at.strides.rank() <= dim ? 0 : at.strides[dim]);
      if (dim == scale.block.rank() - 1) piece.packed = axis;
    }
    if (model.interleaved > 1) {  // its last dimension is two of the grid
      require(piece.block[last] == 1 && piece.packed != last, ErrorKind::kLayout,
              "{}: blocks of several interleaved parts are not handled", model.name);
      const auto stride = piece.at.strides[last];
      piece.at.strides[last] = stride * model.interleaved;
      piece.at.strides.push_back(stride);
      piece.block.push_back(1);
    }
    plan.scales[static_cast<std::size_t>(link.scale)] = piece;
  }
}

}  // namespace

std::int64_t CopyPlan::num_bytes() const {
  std::int64_t total = 0;
  for (const auto& planned : tensors) total += planned.tensor.num_bytes();
  return total;
}

Placement place(const Piece& piece, const Box& box) {
  Placement at = piece.at;
  at.offset = address(piece.at, minus(box.offset, piece.box.offset));
  return at;
}

CopyPlan plan_read(const std::vector<ModelTensor>& tensors,
                   const PlanSide& source,
                   Transform cast) {
  auto side = plan_side(tensors, source, "read");
  CopyPlan plan;
  plan.discards = std::move(side.padding);
  plan.tensors.reserve(tensors.size());
  for (std::size_t m = 0; m < tensors.size(); ++m) {
    PlannedTensor planned{.tensor = tensors[m]};
    auto& covers = side.covers[m];
    for (std::size_t copy = 0; copy < covers.size(); ++copy) {
      if (copy == 0) {
        planned.source = std::move(covers[copy]);
      } else {
        planned.replicas.push_back(std::move(covers[copy]));
      }
    }
    planned.on_read = transform_on_read(planned, cast);
    settle_less(planned);
    plan.tensors.push_back(std::move(planned));
  }
  plan_scales(tensors, source, plan);
  return plan;
}

CopyPlan plan_copy(const std::vector<ModelTensor>& tensors,
                   const PlanSide& source,
                   const PlanSide& target,
                   Transform cast) {
  CopyPlan plan = with_context([] { return std::string("planning the source"); },
                               [&] { return plan_read(tensors, source, cast); });
  auto side = with_context([] { return std::string("planning the target"); },
                           [&] { return plan_side(tensors, target, "written"); });
  plan.fills = std::move(side.padding);
  for (std::size_t m = 0; m < tensors.size(); ++m) {
    plan.tensors[m].targets = std::move(side.covers[m]);
    settle_less(plan.tensors[m]);
  }
  return plan;
}

CopyPlan keep_targets(CopyPlan plan, const std::function<bool(StorageId)>& keep) {
  std::erase_if(plan.fills, [&](const Padding& fill) { return !keep(fill.at.storage); });
  std::erase_if(plan.tensors, [&](PlannedTensor& planned) {
    for (auto& cover : planned.targets) {
      std::erase_if(cover, [&](const Piece& piece) { return !keep(piece.at.storage); });
    }
    std::erase_if(planned.targets, [](const Cover& cover) { return cover.empty(); });
    return planned.targets.empty();
  });
  return plan;
}

std::vector<CopyOp> copy_ops(const PlannedTensor& planned) {
  std::vector<CopyOp> ops;
  for (const auto& cover : planned.targets) {
    for (const auto& target : cover) {
      for (const auto& source : planned.source) {
        const auto box = intersect(source.box, target.box);
        if (!box) continue;
        ops.push_back({.box = *box,
                       .source = place(source, *box),
                       .target = place(target, *box),
                       .source_dtype = source.dtype,
                       .dtype = planned.tensor.dtype,
                       .target_dtype = target.dtype,
                       .transform = transform_of(source, planned.tensor, planned.on_read),
                       .scale = source.scale});
      }
    }
  }
  return ops;
}

}  // namespace ferry::distckpt
