#include "distckpt/schedule.h"

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

}  // namespace

Schedule make_schedule(const CopyPlan& plan, bool writes) {
  Schedule schedule;
  // Tensors in the order in which the source's files hold them, so that those are read from front
  // to back.
  std::vector<std::uint32_t> order(plan.tensors.size());
  std::iota(order.begin(), order.end(), 0U);
  std::ranges::stable_sort(order, {}, [&](std::uint32_t i) {
    const auto& source = plan.tensors[i].source;
    return source.empty() ? std::pair(StorageId{0}, std::int64_t{0})
                          : std::pair(source.front().at.storage, source.front().at.offset);
  });
  std::int64_t room = 0;
  const auto add = [&](Segment segment, std::int64_t bytes) {
    if (bytes > room) {
      schedule.tasks.push_back({.first = static_cast<std::uint32_t>(schedule.segments.size())});
      room = kTaskBytes;
    }
    room -= bytes;
    ++schedule.tasks.back().count;
    schedule.segments.push_back(segment);
  };
  for (const auto i : order) {
    const auto total = plan.tensors[i].tensor.num_bytes();
    for (std::int64_t begin = 0; begin < total; begin += kTaskBytes) {
      const auto end = std::min(total, begin + kTaskBytes);
      add({.kind = Segment::Kind::kTensor, .index = i, .begin = begin, .end = end}, end - begin);
    }
  }
  const auto add_padding = [&](Segment::Kind kind, const std::vector<Padding>& regions) {
    for (std::uint32_t i = 0; i < regions.size(); ++i) {
      const auto step = kTaskBytes / size_of(regions[i].dtype);
      const auto total = regions[i].box.volume();
      for (std::int64_t begin = 0; begin < total; begin += step) {
        const auto end = std::min(total, begin + step);
        add({.kind = kind, .index = i, .begin = begin, .end = end},
            (end - begin) * size_of(regions[i].dtype));
      }
    }
  };
  add_padding(Segment::Kind::kDiscard, plan.discards);
  if (writes) add_padding(Segment::Kind::kFill, plan.fills);
  return schedule;
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
