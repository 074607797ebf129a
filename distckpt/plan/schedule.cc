#include "distckpt/plan/schedule.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "distckpt/base/integers.h"
#include "distckpt/plan/box_io.h"

namespace ferry::distckpt {
namespace {

// The widest stored element per model element, over everything that is read or written with another
// dtype.
std::int64_t widening(const CopyPlan& plan) {
  std::int64_t factor = 1;
  const auto look = [&](const PlannedTensor& planned, const Cover& cover) {
    for (const auto& piece : cover) {
      factor = std::max(factor, size_of(piece.dtype) / size_of(planned.tensor.dtype));
    }
  };
  for (const auto& planned : plan.tensors) {
    look(planned, planned.source);
    for (const auto& cover : planned.replicas) look(planned, cover);
    for (const auto& cover : planned.targets) look(planned, cover);
  }
  return factor;
}

// Segments of slabs are about this long where each slab is written as it was read. A segment ends
// at a whole stretch, so that the slab there is read in two parts, by two tasks.
constexpr std::int64_t kSlabSegment = std::int64_t{64} << 20;
// Smaller matrices fit into a stretch, and are read as they are.
constexpr std::int64_t kSmallestSlab = std::int64_t{256} << 10;

// The dimensions as the elements of a piece lie. One of size one follows the one before it.
std::vector<int> order_of(const Piece& piece) {
  std::vector<int> order;
  for (int d = 0; d < piece.box.rank(); ++d) {
    if (piece.box.size[d] > 1) order.push_back(d);
  }
  std::ranges::stable_sort(order,
                           [&](int a, int b) { return piece.at.strides[a] > piece.at.strides[b]; });
  for (int d = 0; d < piece.box.rank(); ++d) {
    if (piece.box.size[d] > 1) continue;
    const auto before = std::ranges::find(order, d - 1);
    order.insert(before == order.end() ? order.begin() : before + 1, d);
  }
  return order;
}

// The first dimensions that come first where the elements of the piece lie, too.
int leading_in_order(const Piece& piece) {
  int leading = 0;
  for (const auto d : order_of(piece)) {
    if (d != leading) break;
    ++leading;
  }
  return leading;
}

// At most `most` elements, and where that is more than a row of some dimension, whole ones.
std::int64_t whole_rows(const Dims& size, std::int64_t most) {
  std::int64_t row = 1;
  for (int d = size.rank() - 1; d >= 0 && row * size[d] <= most; --d) row *= size[d];
  return row == 0 ? most : most / row * row;
}

// The slabs that one tensor needs at a time.
std::int64_t num_slabs(const PlannedTensor& planned, bool amends) {
  const auto moved = [](const Cover& cover) { return !order_of(cover).empty(); };
  const auto written = std::ranges::any_of(planned.targets, moved);
  return std::int64_t{moved(planned.source) || written} +
         std::int64_t{moved(planned.source) && written && amends} +
         std::ranges::count_if(planned.replicas, moved);
}

class ScheduleBuilder {
 public:
  explicit ScheduleBuilder(const CopyPlan& plan, InOrder order = InOrder::kStretches)
      : plan_(plan), order_(order) {}

  // Tensors in the order in which the source's files hold them, so that those are read from front
  // to back.
  void add_tensors() {
    std::vector<std::uint32_t> order(plan_.tensors.size());
    std::iota(order.begin(), order.end(), 0U);
    std::ranges::stable_sort(order, {}, [&](std::uint32_t i) {
      const auto& source = plan_.tensors[i].source;
      return source.empty() ? std::pair(StorageId{0}, std::int64_t{0})
                            : std::pair(source.front().at.storage, source.front().at.offset);
    });
    for (const auto i : order) {
      const auto total = plan_.tensors[i].tensor.num_bytes();
      const auto length = segment_bytes(plan_.tensors[i]);
      for (std::int64_t at = 0, end = 0; at < total; at += length) {
        const auto begin = std::exchange(end, std::min(total, round_up(at + length, kTaskBytes)));
        if (begin == end) continue;
        add({.kind = Segment::Kind::kTensor, .index = i, .begin = begin, .end = end}, end - begin);
      }
    }
  }

  // Pieces in the order in which the source's files hold what they want.
  void add_pieces() {
    using Key = std::pair<StorageId, std::int64_t>;
    std::vector<std::pair<Key, Segment>> pieces;
    for (std::uint32_t i = 0; i < plan_.tensors.size(); ++i) {
      const auto& planned = plan_.tensors[i];
      for (std::uint32_t c = 0; c < planned.targets.size(); ++c) {
        for (std::uint32_t p = 0; p < planned.targets[c].size(); ++p) {
          pieces.emplace_back(
              first_source(planned, planned.targets[c][p].box),
              Segment{.kind = Segment::Kind::kPiece, .index = i, .cover = c, .piece = p});
        }
      }
    }
    std::ranges::stable_sort(pieces, {}, [](const auto& one) { return one.first; });
    for (const auto& [_, piece] : pieces) {
      const auto& planned = plan_.tensors[piece.index];
      const auto& box = planned.targets[piece.cover][piece.piece].box;
      const auto element_size = size_of(planned.tensor.dtype);
      const auto step =
          whole_rows(reorder(box.size, order_of(planned.source)), kTaskBytes / element_size);
      for (std::int64_t begin = 0; begin < box.volume(); begin += step) {
        auto segment = piece;
        segment.begin = begin;
        segment.end = std::min(box.volume(), begin + step);
        add(segment, (segment.end - begin) * element_size);
      }
    }
  }

  void add_padding(Segment::Kind kind, const std::vector<Padding>& regions) {
    for (std::uint32_t i = 0; i < regions.size(); ++i) {
      const auto step = kTaskBytes / size_of(regions[i].dtype);
      const auto total = regions[i].box.volume();
      for (std::int64_t begin = 0; begin < total; begin += step) {
        const auto end = std::min(total, begin + step);
        add({.kind = kind, .index = i, .begin = begin, .end = end},
            (end - begin) * size_of(regions[i].dtype));
      }
    }
  }

  Schedule take() { return std::move(schedule_); }

 private:
  void add(const Segment& segment, std::int64_t bytes) {
    if (bytes > room_) {
      schedule_.tasks.push_back({.first = static_cast<std::uint32_t>(schedule_.segments.size())});
      room_ = kTaskBytes;
    }
    room_ -= bytes;
    ++schedule_.tasks.back().count;
    schedule_.segments.push_back(segment);
  }

  static std::pair<StorageId, std::int64_t> first_source(const PlannedTensor& planned,
                                                         const Box& box) {
    for (const auto& source : planned.source) {
      const auto both = intersect(source.box, box);
      if (!both) continue;
      const auto at = place(source, *both);
      return {at.storage, at.offset};
    }
    return {};
  }

  // Whole slabs. One where somebody takes the elements in the model's order, so that what comes out
  // of turn stays little.
  std::int64_t segment_bytes(const PlannedTensor& planned) const {
    if (order_ == InOrder::kTensors) return planned.tensor.num_bytes();
    const auto cut = slab_cut(planned);
    if (!cut) return kTaskBytes;
    if (order_ == InOrder::kSlabbed) return planned.tensor.num_bytes();
    const bool in_order = order_ == InOrder::kSlabs || !planned.replicas.empty() ||
                          std::ranges::any_of(planned.targets, [](const Cover& cover) {
                            return order_of(cover).empty();
                          });
    return in_order ? cut->bytes
                    : std::max<std::int64_t>(1, kSlabSegment / cut->bytes) * cut->bytes;
  }

  const CopyPlan& plan_;
  InOrder order_;
  Schedule schedule_;
  std::int64_t room_ = 0;
};

}  // namespace

std::vector<int> order_of(const Cover& cover) {
  for (const auto& piece : cover) {
    auto order = order_of(piece);
    if (!std::ranges::is_sorted(order)) return order;
  }
  return {};
}

Box part_in_order(const Box& box, const std::vector<int>& order, const Box& part) {
  auto found = box;
  for (int i = 0; i < box.rank(); ++i) {
    const int d = order.empty() ? i : order[static_cast<std::size_t>(i)];
    found.offset[d] += part.offset[i];
    found.size[d] = part.size[i];
  }
  return found;
}

void visit_tiles(const Box& box,
                 const std::vector<int>& order,
                 std::int64_t most,
                 const std::function<void(const Box&)>& visit) {
  const auto size = reorder(box.size, order);
  const auto step = whole_rows(size, most);
  for (std::int64_t begin = 0; begin < box.volume(); begin += step) {
    for (const auto& flat : split_flat_range(size, begin, std::min(box.volume(), begin + step))) {
      visit(part_in_order(box, order, flat.box));
    }
  }
}

FlatRange SlabCut::slab_of(const Shape& grid, std::int64_t element) const {
  const auto row = grid.drop_front(dim + 1).product();
  const auto outer = element / row / grid[dim] * grid[dim];
  const auto first = (element / row - outer) / rows * rows;
  return {.begin = (outer + first) * row, .end = (outer + std::min(first + rows, grid[dim])) * row};
}

std::optional<SlabCut> slab_cut(const PlannedTensor& planned) {
  const auto grid = planned.tensor.grid();
  if (planned.tensor.num_bytes() <= kTaskBytes) return std::nullopt;
  int dim = grid.rank();
  bool less = planned.less != 0;
  const auto look = [&](const Cover& cover) {
    for (const auto& piece : cover) {
      dim = std::min(dim, leading_in_order(piece));
      less = less || piece.less != 0;
    }
  };
  look(planned.source);
  for (const auto& cover : planned.replicas) look(cover);
  for (const auto& cover : planned.targets) look(cover);
  if (less || dim == grid.rank()) return std::nullopt;
  const auto row = grid.drop_front(dim + 1).product() * size_of(planned.tensor.dtype);
  if (row > kSlabBytes || row * grid[dim] < kSmallestSlab) return std::nullopt;
  const auto rows = ceil_div(grid[dim], ceil_div(grid[dim], kSlabBytes / row));
  return SlabCut{.dim = dim, .rows = rows, .bytes = rows * row};
}

Schedule make_schedule(const CopyPlan& plan, bool writes, InOrder order) {
  ScheduleBuilder builder(plan, order);
  builder.add_tensors();
  builder.add_padding(Segment::Kind::kDiscard, plan.discards);
  if (writes) builder.add_padding(Segment::Kind::kFill, plan.fills);
  return builder.take();
}

Schedule make_target_schedule(const CopyPlan& plan) {
  ScheduleBuilder builder(plan);
  builder.add_pieces();
  builder.add_padding(Segment::Kind::kDiscard, plan.discards);
  builder.add_padding(Segment::Kind::kFill, plan.fills);
  return builder.take();
}

BufferSizes buffer_sizes(const CopyPlan& plan, Staged staged) {
  BufferSizes sizes;
  sizes.scratch = kTaskBytes * widening(plan);
  for (const auto& planned : plan.tensors) {
    if (!planned.replicas.empty()) sizes.replica = kTaskBytes;
    const auto cut = slab_cut(planned);
    if (!cut || staged == Staged::kPieces) continue;
    sizes.slab = std::max(sizes.slab, cut->bytes);
    sizes.slabs = std::max(sizes.slabs, num_slabs(planned, staged == Staged::kAmended));
  }
  return sizes;
}

}  // namespace ferry::distckpt
