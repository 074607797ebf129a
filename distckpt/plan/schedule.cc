#include "distckpt/plan/schedule.h"

#include <algorithm>
#include <numeric>
#include <utility>

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

class ScheduleBuilder {
 public:
  explicit ScheduleBuilder(const CopyPlan& plan) : plan_(plan) {}

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
      for (std::int64_t begin = 0; begin < total; begin += kTaskBytes) {
        const auto end = std::min(total, begin + kTaskBytes);
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
      const auto step = whole_rows(box.size, kTaskBytes / element_size);
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

  // At most `most` elements, and where that is more than a row of some dimension, whole ones.
  static std::int64_t whole_rows(const Dims& size, std::int64_t most) {
    std::int64_t row = 1;
    for (int d = size.rank() - 1; d >= 0 && row * size[d] <= most; --d) row *= size[d];
    return row == 0 ? most : most / row * row;
  }

  const CopyPlan& plan_;
  Schedule schedule_;
  std::int64_t room_ = 0;
};

}  // namespace

Schedule make_schedule(const CopyPlan& plan, bool writes) {
  ScheduleBuilder builder(plan);
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

BufferSizes buffer_sizes(const CopyPlan& plan) {
  BufferSizes sizes;
  sizes.scratch = kTaskBytes * widening(plan);
  for (const auto& planned : plan.tensors) {
    if (!planned.replicas.empty()) sizes.replica = kTaskBytes;
  }
  return sizes;
}

}  // namespace ferry::distckpt
