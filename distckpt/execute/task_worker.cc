#include "distckpt/execute/task_worker.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <string>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "distckpt/elements/arithmetic.h"
#include "distckpt/execute/file_box_io.h"
#include "distckpt/execute/piece_io.h"

namespace ferry::distckpt {

class TaskWorker::Impl {
 public:
  Impl(TaskWorker& owner,
       const CopyPlan& plan,
       const BufferSizes& sizes,
       std::pmr::memory_resource* resource,
       BoxSource& source,
       BoxSink* sink,
       const Amend& amend)
      : owner_(owner),
        plan_(plan),
        source_(source),
        sink_(sink),
        amend_(amend),
        io_(plan, sizes.scratch, resource, source, sink),
        staging_(resource, sizes.staging),
        replica_(resource, sizes.replica) {
    for (std::int64_t i = 0; i < sizes.slabs; ++i) slabs_.emplace_back(resource, sizes.slab);
  }

  // `compared` is called for each replica's stretch.
  void run(const Segment& segment,
           const std::function<void(const Comparison&)>& compared,
           const std::stop_token& stop) {
    switch (segment.kind) {
      case Segment::Kind::kTensor:
        return run_tensor(segment, compared, stop);
      case Segment::Kind::kPiece:
        return run_piece(segment);
      case Segment::Kind::kDiscard:
        return run_discard(segment);
      case Segment::Kind::kFill:
        return run_fill(segment);
    }
  }

  void read(std::uint32_t index, const Box& box, std::span<std::byte> into) {
    const auto& planned = plan_.tensors[index];
    read_cover(planned.tensor, planned.source, 0, box, planned.on_read, into);
    std::vector<std::byte> again(planned.replicas.empty() ? 0 : into.size());
    for (const auto& cover : planned.replicas) {
      const bool taken = comparable_less(planned.less, cover) != planned.less;
      if (!taken) read_cover(planned.tensor, cover, 0, box, planned.on_read, again);
      require(taken ? equal_where_rounded(planned, cover, box) : std::ranges::equal(into, again),
              ErrorKind::kLayout, "{}: its second copy differs from the first, in {}",
              planned.tensor.name, to_string(box));
    }
  }

 private:
  // Elements of `tensor` less `less`, in its dtype.
  void read_cover(const ModelTensor& tensor,
                  const Cover& cover,
                  int less,
                  const Box& box,
                  Transform transform,
                  std::span<std::byte> into) {
    const auto size = size_of(tensor.dtype);
    const auto strides = byte_strides(box.size, size);
    for (const auto& piece : cover) {
      const auto part = intersect(piece.box, box);
      if (!part) continue;
      if (*part == box) return read_part(tensor, piece, less, box, transform, into);
      const auto elements = io_.scratch(part->volume() * size);
      read_part(tensor, piece, less, *part, transform, elements);
      std::int64_t first = 0;
      for (int d = 0; d < box.rank(); ++d) first += (part->offset[d] - box.offset[d]) * strides[d];
      copy_strided(into.data() + first, strides, elements.data(), byte_strides(part->size, size),
                   part->size, size);
    }
  }

  // A stretch of a model tensor in staging: elements [begin, end), as boxes.
  struct Stretch {
    const ModelTensor& tensor;
    int less = 0;  // its elements are those of the tensor less this
    std::int64_t begin = 0;
    std::vector<FlatPiece> boxes;
    Dims strides;  // of the model tensor, in bytes

    // The place of element `at` of the tensor in staging, in bytes.
    std::int64_t position(const Dims& at) const {
      std::int64_t offset = -begin * size_of(tensor.dtype);
      for (int d = 0; d < at.rank(); ++d) offset += at[d] * strides[d];
      return offset;
    }
    // True if the elements of `box` follow each other in staging.
    bool packed(const Box& box) const {
      return fold_runs({.at = {.strides = strides},
                        .size = box.size,
                        .element_size = size_of(tensor.dtype)})
                 .num_runs() == 1;
    }
  };

  static Stretch make_stretch(const PlannedTensor& planned, std::int64_t begin, std::int64_t end) {
    const auto& tensor = planned.tensor;
    const auto size = size_of(tensor.dtype);
    return {.tensor = tensor,
            .less = planned.less,
            .begin = begin / size,
            .boxes = split_flat_range(tensor.grid(), begin / size, end / size),
            .strides = byte_strides(tensor.grid(), size)};
  }

  // Calls visit(piece, box) for each part of the cover that lies in the stretch.
  template <typename Visit>
  static void visit_parts(const Cover& cover, const Stretch& stretch, Visit&& visit) {
    for (const auto& piece : cover) {
      for (const auto& flat : stretch.boxes) {
        if (const auto box = intersect(piece.box, flat.box)) visit(piece, *box);
      }
    }
  }

  void read_part(const ModelTensor& tensor,
                 const Piece& piece,
                 int less,
                 const Box& box,
                 Transform transform,
                 std::span<std::byte> into) {
    io_.read(tensor, piece, less, box, {}, transform, into, owner_.record.read);
  }

  void gather(const Cover& cover,
              const Stretch& stretch,
              Transform transform,
              std::span<std::byte> staging) {
    visit_parts(cover, stretch, [&](const Piece& piece, const Box& box) {
      const auto bytes = box.volume() * size_of(stretch.tensor.dtype);
      auto* const into = staging.data() + stretch.position(box.offset);
      const bool packed = stretch.packed(box);
      const auto converted =
          packed ? std::span(into, static_cast<std::size_t>(bytes)) : io_.scratch(bytes);
      read_part(stretch.tensor, piece, stretch.less, box, transform, converted);
      if (packed) return;
      copy_strided(into, stretch.strides, converted.data(),
                   byte_strides(box.size, size_of(stretch.tensor.dtype)), box.size,
                   size_of(stretch.tensor.dtype));
    });
  }

  void scatter(const Cover& cover, const Stretch& stretch, std::span<const std::byte> staging) {
    visit_parts(cover, stretch, [&](const Piece& piece, const Box& box) {
      const auto& tensor = stretch.tensor;
      const auto bytes = box.volume() * size_of(tensor.dtype);
      const auto* const from = staging.data() + stretch.position(box.offset);
      std::span<const std::byte> packed(from, static_cast<std::size_t>(bytes));
      if (!stretch.packed(box)) {
        const auto into = io_.scratch(bytes);
        copy_strided(into.data(), byte_strides(box.size, size_of(tensor.dtype)), from,
                     stretch.strides, box.size, size_of(tensor.dtype));
        packed = into;
      }
      io_.write(tensor, piece, stretch.less, box, {}, packed, owner_.record.written);
    });
  }

  // Elements of which one side was rounded when something was taken from them are compared so: the
  // way there is one, the way back is not.
  static int comparable_less(int less, const Cover& replica) {
    for (const auto& piece : replica) less = std::max(less, piece.less);
    return less;
  }

  // True if a replica from which something was taken is what the source gives in its dtype, in
  // which it was rounded, whatever that of the plan.
  bool equal_where_rounded(const PlannedTensor& planned, const Cover& replica, const Box& box) {
    auto stored = planned.tensor;
    stored.dtype = replica.front().dtype;
    const auto less = comparable_less(planned.less, replica);
    const auto bytes = static_cast<std::size_t>(box.volume() * size_of(stored.dtype));
    std::vector<std::byte> expected(bytes), found(bytes);
    read_cover(stored, planned.source, planned.less, box, Transform::kCast, expected);
    add_number(stored.dtype, expected, planned.less - less);
    read_cover(stored, replica, less, box, Transform::kCast, found);
    return expected == found;
  }

  // The slabs of a tensor that is gone through slab by slab.
  struct Slabs {
    SlabCut cut{};
    FlatRange segment{};  // elements of a slab outside of it are another task's
    Slab* source = nullptr;
    Slab* target = nullptr;  // is also `source` where nothing changes in between
    std::vector<Slab*> replicas{};
  };

  std::optional<Slabs> make_slabs(const PlannedTensor& planned, const Segment& segment) {
    const auto cut = slab_cut(planned);
    if (!cut) return std::nullopt;
    const auto size = size_of(planned.tensor.dtype);
    Slabs slabs{.cut = *cut, .segment = {.begin = segment.begin / size, .end = segment.end / size}};
    auto free = slabs_.begin();
    const auto take = [&] {
      require(free != slabs_.end(), ErrorKind::kBug, "too few slabs");
      free->clear();
      return &*free++;
    };
    if (!order_of(planned.source).empty()) slabs.source = take();
    for (const auto& cover : planned.replicas)
      slabs.replicas.push_back(order_of(cover).empty() ? nullptr : take());
    const bool written = sink_ != nullptr && std::ranges::any_of(planned.targets, [](auto& cover) {
                           return !order_of(cover).empty();
                         });
    if (written) slabs.target = slabs.source != nullptr && !amend_ ? slabs.source : take();
    return slabs;
  }

  // Calls visit(elements, slab that they lie in) for each slab of a stretch; what of the slab is
  // this task's.
  template <typename Visit>
  static void visit_slabs(const PlannedTensor& planned,
                          const Slabs& slabs,
                          const FlatRange& stretch,
                          Visit&& visit) {
    const auto grid = planned.tensor.grid();
    for (auto at = stretch.begin; at < stretch.end;) {
      const auto slab = slabs.cut.slab_of(grid, at);
      const FlatRange held{.begin = std::max(slab.begin, slabs.segment.begin),
                           .end = std::min(slab.end, slabs.segment.end)};
      const auto end = std::min(held.end, stretch.end);
      visit(FlatRange{.begin = at, .end = end}, slab, held);
      at = end;
    }
  }

  void gather_from(const PlannedTensor& planned,
                   const Cover& cover,
                   const Slabs& slabs,
                   Slab& slab,
                   const FlatRange& stretch,
                   std::span<std::byte> staging) {
    const auto size = size_of(planned.tensor.dtype);
    visit_slabs(planned, slabs, stretch,
                [&](const FlatRange& part, const FlatRange& whole, const FlatRange& held) {
                  if (!slab.holds(part.begin)) {
                    if (&slab == slabs.target) store(planned, slab);
                    slab.begin(planned.tensor, whole, held, order_of(cover));
                    slab.load(planned.tensor, cover, planned.on_read, io_, owner_.record.read);
                  }
                  slab.get(planned.tensor, part,
                           staging.data() + (part.begin - stretch.begin) * size);
                });
  }

  void scatter_to(const PlannedTensor& planned,
                  const Slabs& slabs,
                  Slab& slab,
                  const FlatRange& stretch,
                  std::span<const std::byte> staging) {
    const auto size = size_of(planned.tensor.dtype);
    const auto moved = std::ranges::find_if(
        planned.targets, [](const Cover& cover) { return !order_of(cover).empty(); });
    visit_slabs(planned, slabs, stretch,
                [&](const FlatRange& part, const FlatRange& whole, const FlatRange& held) {
                  if (!slab.holds(part.begin)) {
                    store(planned, slab);
                    slab.begin(planned.tensor, whole, held, order_of(*moved));
                  }
                  slab.set(planned.tensor, part,
                           staging.data() + (part.begin - stretch.begin) * size);
                });
  }

  // Writes a slab, once, to the covers that lie in another order than the model.
  void store(const PlannedTensor& planned, Slab& slab) {
    for (const auto& cover : planned.targets) {
      if (!order_of(cover).empty()) slab.store(planned.tensor, cover, io_, owner_.record.written);
    }
    slab.clear();
  }

  void run_tensor(const Segment& segment,
                  const std::function<void(const Comparison&)>& compared,
                  const std::stop_token& stop) {
    const auto& planned = plan_.tensors[segment.index];
    const auto slabs = make_slabs(planned, segment);
    for (auto begin = segment.begin; begin < segment.end; begin += kTaskBytes) {
      if (stop.stop_requested()) return;
      const auto end = std::min(segment.end, begin + kTaskBytes);
      run_stretch(segment.index, make_stretch(planned, begin, end), slabs, end - begin, compared);
    }
    if (slabs && slabs->target != nullptr) store(planned, *slabs->target);
  }

  void run_stretch(std::uint32_t index,
                   const Stretch& stretch,
                   const std::optional<Slabs>& slabs,
                   std::int64_t bytes,
                   const std::function<void(const Comparison&)>& compared) {
    const auto& planned = plan_.tensors[index];
    const FlatRange range{.begin = stretch.begin,
                          .end = stretch.begin + bytes / size_of(planned.tensor.dtype)};
    const auto fill = [&](const Cover& cover, const Stretch& as, Slab* slab, auto into) {
      if (slab == nullptr) return gather(cover, as, planned.on_read, into);
      gather_from(planned, cover, *slabs, *slab, range, into);
    };
    const auto staging = staging_.first(bytes);
    fill(planned.source, stretch, slabs ? slabs->source : nullptr, staging);
    for (std::uint32_t r = 0; r < planned.replicas.size(); ++r) {
      const auto& cover = planned.replicas[r];
      const auto replica = replica_.first(bytes);
      auto compared_as = stretch;
      compared_as.less = comparable_less(stretch.less, cover);
      fill(cover, compared_as, slabs ? slabs->replicas[r] : nullptr, replica);
      std::span<const std::byte> expected = staging;
      std::vector<std::byte> moved;
      const bool taken = compared_as.less != stretch.less;
      if (taken) {
        moved.assign(staging.begin(), staging.end());
        add_number(planned.tensor.dtype, moved, stretch.less - compared_as.less);
        expected = moved;
      }
      const bool equal =
          taken && cover.front().dtype != planned.tensor.dtype
              ? std::ranges::all_of(stretch.boxes,
                                    [&](const FlatPiece& part) {
                                      return equal_where_rounded(planned, cover, part.box);
                                    })
              : std::memcmp(expected.data(), replica.data(), expected.size()) == 0;
      compared({.tensor = index,
                .replica = r,
                .element = stretch.begin,
                .expected = expected,
                .found = replica,
                .equal = equal});
    }
    if (amend_) amend_(index, stretch.begin, staging);
    for (std::int64_t at = 0; at < bytes; at += kDigestBlock) {
      owner_.record.blocks.push_back(digest_block(
          staging.subspan(static_cast<std::size_t>(at),
                          static_cast<std::size_t>(std::min(kDigestBlock, bytes - at)))));
    }
    if (sink_ == nullptr) return;
    if (slabs && slabs->target != nullptr && slabs->target != slabs->source)
      scatter_to(planned, *slabs, *slabs->target, range, staging);
    for (const auto& cover : planned.targets) {
      if (!slabs || order_of(cover).empty()) scatter(cover, stretch, staging);
    }
  }

  // A piece of a target: each of its intersections with the source's pieces is a copy of its own,
  // into the place where it belongs if the sink has one to give.
  void run_piece(const Segment& segment) {
    const auto& planned = plan_.tensors[segment.index];
    const auto& piece = planned.targets[segment.cover][segment.piece];
    const auto order = order_of(planned.source);
    for (const auto& flat :
         split_flat_range(reorder(piece.box.size, order), segment.begin, segment.end)) {
      const auto part = part_in_order(piece.box, order, flat.box);
      for (const auto& source : planned.source) {
        const auto box = intersect(source.box, part);
        if (!box) continue;
        copy_part(planned, source, piece, *box);
        for (const auto& replica : planned.replicas) compare_part(planned, source, replica, *box);
      }
    }
  }

  void copy_part(const PlannedTensor& planned,
                 const Piece& source,
                 const Piece& target,
                 const Box& box) {
    const auto& tensor = planned.tensor;
    const auto region = region_of(target, box);
    const auto leased = sink_->lease(region);
    const auto into = leased.empty() ? io_.scratch(region.num_bytes()) : leased;
    const int taken = target.less - planned.less;
    if (target.dtype == tensor.dtype && taken == 0) {
      read_part(tensor, source, planned.less, box, planned.on_read, into);
    } else {
      const auto elements = staging_.first(box.volume() * size_of(tensor.dtype));
      read_part(tensor, source, planned.less, box, planned.on_read, elements);
      PieceIo::store(tensor, elements, target, taken, into, box);
    }
    give(region, leased, into);
  }

  void compare_part(const PlannedTensor& planned,
                    const Piece& source,
                    const Cover& replica,
                    const Box& box) {
    const auto& tensor = planned.tensor;
    for (const auto& other : replica) {
      const auto both = intersect(other.box, box);
      if (!both) continue;
      if (comparable_less(planned.less, replica) != planned.less) {
        if (equal_where_rounded(planned, replica, *both)) continue;
      } else {
        const auto bytes = both->volume() * size_of(tensor.dtype);
        const auto expected = staging_.first(bytes);
        const auto found = replica_.first(bytes);
        read_part(tensor, source, planned.less, *both, planned.on_read, expected);
        read_part(tensor, other, planned.less, *both, planned.on_read, found);
        if (std::ranges::equal(expected, found)) continue;
      }
      const auto first = source_.name_of(source.at.storage);
      fail(ErrorKind::kLayout, "{}: its second copy differs from the first, in {}{}", tensor.name,
           to_string(*both),
           first.empty() ? first
                         : fmt::format(" ({}, and {})", first, source_.name_of(other.at.storage)));
    }
  }

  // `bytes` are the region's, in what was leased for it if that was possible.
  void give(const Region& region, std::span<std::byte> leased, std::span<const std::byte> bytes) {
    if (leased.empty()) {
      sink_->write(region, bytes, owner_.record.written);
    } else {
      sink_->put(region, leased);
    }
  }

  void run_discard(const Segment& segment) {
    const auto& padding = plan_.discards[segment.index];
    visit_padding(padding, segment, [&](const Region& region, const Box& box) {
      const auto bytes = io_.scratch(region.num_bytes());
      source_.read(region, bytes, owner_.record.read);
      if (padding.ones) add_number(padding.dtype, bytes, -1);
      if (!all_zero(bytes))
        owner_.nonzero_padding.push_back({.tensor = padding.tensor, .box = box});
    });
  }

  void run_fill(const Segment& segment) {
    const auto& padding = plan_.fills[segment.index];
    visit_padding(padding, segment, [&](const Region& region, const Box&) {
      const auto leased = sink_->lease(region);
      const auto filled = leased.empty() ? io_.scratch(region.num_bytes()) : leased;
      std::ranges::fill(filled, std::byte{0});
      if (padding.ones) add_number(padding.dtype, filled, 1);
      give(region, leased, filled);
    });
  }

  template <typename Visit>
  static void visit_padding(const Padding& padding, const Segment& segment, Visit&& visit) {
    for (const auto& flat : split_flat_range(padding.box.size, segment.begin, segment.end)) {
      auto at = padding.at;
      auto box = flat.box;
      for (int d = 0; d < box.rank(); ++d) {
        at.offset += box.offset[d] * at.strides[d];
        box.offset[d] += padding.box.offset[d];
      }
      visit(Region{.at = at, .size = box.size, .element_size = size_of(padding.dtype)}, box);
    }
  }

  TaskWorker& owner_;
  const CopyPlan& plan_;
  BoxSource& source_;
  BoxSink* sink_;
  const Amend& amend_;
  PieceIo io_;
  Buffer staging_;
  Buffer replica_;
  std::deque<Slab> slabs_;
};

TaskWorker::TaskWorker(const CopyPlan& plan,
                       const BufferSizes& sizes,
                       std::pmr::memory_resource* resource,
                       BoxSource& source,
                       BoxSink* sink,
                       const Amend& amend)
    : impl_(std::make_unique<Impl>(*this, plan, sizes, resource, source, sink, amend)) {}

TaskWorker::~TaskWorker() = default;

void TaskWorker::read(std::uint32_t tensor, const Box& box, std::span<std::byte> into) {
  impl_->read(tensor, box, into);
}

void TaskWorker::run(const Segment& segment,
                     const std::function<void(const Comparison&)>& compared,
                     const std::stop_token& stop) {
  impl_->run(segment, compared, stop);
}

}  // namespace ferry::distckpt
