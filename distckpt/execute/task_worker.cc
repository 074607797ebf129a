#include "distckpt/execute/task_worker.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "distckpt/elements/arithmetic.h"
#include "distckpt/elements/cast.h"
#include "distckpt/elements/dequantize.h"
#include "distckpt/execute/file_box_io.h"

namespace ferry::distckpt {
namespace {

// A buffer from the caller's memory resource, aligned for O_DIRECT and for devices.
class Buffer {
 public:
  Buffer(std::pmr::memory_resource* resource, std::int64_t size)
      : resource_(resource),
        size_(static_cast<std::size_t>(size)),
        data_(size == 0 ? nullptr
                        : static_cast<std::byte*>(resource->allocate(size_, kAlignment))) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (data_ != nullptr) resource_->deallocate(data_, size_, kAlignment);
  }

  std::span<std::byte> first(std::int64_t size) {
    require(size <= static_cast<std::int64_t>(size_), ErrorKind::kBug,
            "a staging buffer of {} bytes was asked for {}", size_, size);
    return {data_, static_cast<std::size_t>(size)};
  }

 private:
  static constexpr std::size_t kAlignment = 4096;
  std::pmr::memory_resource* resource_;
  std::size_t size_;
  std::byte* data_;
};

}  // namespace

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
        staging_(resource, sizes.staging),
        scratch_(resource, sizes.scratch),
        cast_scratch_(resource, sizes.scratch),
        replica_(resource, sizes.replica) {}

  // `compared` is called for each replica's stretch.
  void run(const Segment& segment, const std::function<void(const Comparison&)>& compared) {
    switch (segment.kind) {
      case Segment::Kind::kTensor:
        return run_tensor(segment, compared);
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
    read_cover(planned, planned.source, box, into);
    std::vector<std::byte> again(planned.replicas.empty() ? 0 : into.size());
    for (const auto& cover : planned.replicas) {
      read_cover(planned, cover, box, again);
      require(std::ranges::equal(into, again), ErrorKind::kLayout,
              "{}: its second copy differs from the first, in {}", planned.tensor.name,
              to_string(box));
    }
  }

 private:
  void read_cover(const PlannedTensor& planned,
                  const Cover& cover,
                  const Box& box,
                  std::span<std::byte> into) {
    const auto size = size_of(planned.tensor.dtype);
    const auto strides = byte_strides(box.size, size);
    for (const auto& piece : cover) {
      const auto part = intersect(piece.box, box);
      if (!part) continue;
      if (*part == box) return read_part(planned.tensor, piece, 0, box, planned.on_read, into);
      const auto elements = scratch_.first(part->volume() * size);
      read_part(planned.tensor, piece, 0, *part, planned.on_read, elements);
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

  static Region region_of(const Piece& piece, const Box& box) {
    return {.at = place(piece, box), .size = box.size, .element_size = size_of(piece.dtype)};
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
          packed ? std::span(into, static_cast<std::size_t>(bytes)) : scratch_.first(bytes);
      read_part(stretch.tensor, piece, stretch.less, box, transform, converted);
      if (packed) return;
      copy_strided(into, stretch.strides, converted.data(),
                   byte_strides(box.size, size_of(stretch.tensor.dtype)), box.size,
                   size_of(stretch.tensor.dtype));
    });
  }

  // The part `box` of a piece, packed, as elements of the tensor less `less`.
  void read_part(const ModelTensor& tensor,
                 const Piece& piece,
                 int less,
                 const Box& box,
                 Transform transform,
                 std::span<std::byte> into) {
    if (piece.scale >= 0) return dequantize_piece(tensor, piece, box, into);
    const auto region = region_of(piece, box);
    const int added = piece.less - less;
    if (piece.dtype == tensor.dtype) {
      source_.read(region, into, owner_.record.read);
      if (added != 0) add_number(tensor.dtype, into, added);
      return;
    }
    const auto raw = cast_scratch_.first(region.num_bytes());
    source_.read(region, raw, owner_.record.read);
    if (added != 0) {
      add_number(piece.dtype, raw, added);
      transform = Transform::kCast;
    }
    convert(tensor.name, piece.dtype, raw, tensor.dtype, into, transform, box);
  }

  float read_global(const ScalePiece& scale) {
    float value = 1;
    if (scale.how == GlobalScale::kNone) return value;
    std::vector<ChecksumPart> unused;
    source_.read({.at = {.storage = scale.global.storage, .offset = scale.global.offset},
                  .element_size = sizeof(value)},
                 std::as_writable_bytes(std::span(&value, 1)), unused);
    return value;
  }

  // Elements are read, unpacked and scaled in the order in which they lie, then brought into that
  // of the tensor.
  void dequantize_piece(const ModelTensor& tensor,
                        const Piece& piece,
                        const Box& box,
                        std::span<std::byte> into) {
    const auto& scale = plan_.scales[static_cast<std::size_t>(piece.scale)];
    const auto pack = pack_size(scale.encoding);
    auto order = order_of_storage(piece.at.strides);
    std::ranges::stable_partition(order, [&](int d) { return d != scale.packed; });
    Box lying;  // what is read, of which `box` is a part: whole packs
    Region data{.at = {.storage = piece.at.storage, .offset = piece.at.offset},
                .element_size = size_of(piece.dtype)};
    Region of_scales{.at = {.storage = scale.at.storage, .offset = scale.at.offset},
                     .element_size = size_of(scale.dtype)};
    BlockScales scales{.dtype = scale.dtype, .how = scale.how, .global = read_global(scale)};
    for (const int d : order) {
      const auto count = d == scale.packed ? pack : 1;
      const auto begin = box.offset[d] / count;
      const auto end = ceil_div(box.end(d), count);
      lying.offset.push_back(begin * count);
      lying.size.push_back((end - begin) * count);
      data.at.offset += (begin - piece.box.offset[d] / count) * piece.at.strides[d];
      data.at.strides.push_back(piece.at.strides[d]);
      data.size.push_back(end - begin);
      scales.block.push_back(scale.block[d]);
      of_scales.at.strides.push_back(scale.at.strides[d]);
    }
    scales.box = scales_of(lying, scales.block);
    for (int i = 0; i < scales.box.rank(); ++i)
      of_scales.at.offset += scales.box.offset[i] * of_scales.at.strides[i];
    of_scales.size = scales.box.size;
    std::vector<std::byte> scale_bytes(static_cast<std::size_t>(of_scales.num_bytes()));
    std::vector<ChecksumPart> unused;  // a scale is read as often as its blocks are cut
    source_.read(of_scales, scale_bytes, unused);
    scales.packed = scale_bytes;
    const auto raw = cast_scratch_.first(data.num_bytes());
    source_.read(data, raw, owner_.record.read);

    const auto size = size_of(tensor.dtype);
    const bool as_it_lies = lying.volume() == box.volume() && std::ranges::is_sorted(order);
    std::vector<std::byte> values(static_cast<std::size_t>(as_it_lies ? 0 : lying.volume() * size));
    const auto overflow = dequantize(lying, scale.encoding, raw, scales, tensor.dtype,
                                     as_it_lies ? into : std::span(values));
    require(!overflow, ErrorKind::kLayout, "{}: element {} of {} overflows {} when dequantised",
            tensor.name, overflow.value_or(0), to_string(box), short_name(tensor.dtype));
    if (as_it_lies) return;
    const auto from_strides = byte_strides(lying.size, size);
    std::int64_t first = 0;
    const auto offset = reorder(box.offset, order);
    for (int i = 0; i < lying.rank(); ++i) first += (offset[i] - lying.offset[i]) * from_strides[i];
    copy_strided(into.data(), reorder(byte_strides(box.size, size), order), values.data() + first,
                 from_strides, reorder(box.size, order), size);
  }

  void scatter(const Cover& cover, const Stretch& stretch, std::span<const std::byte> staging) {
    visit_parts(cover, stretch, [&](const Piece& piece, const Box& box) {
      const auto& tensor = stretch.tensor;
      const auto bytes = box.volume() * size_of(tensor.dtype);
      const auto* const from = staging.data() + stretch.position(box.offset);
      std::span<const std::byte> packed(from, static_cast<std::size_t>(bytes));
      if (!stretch.packed(box)) {
        const auto into = scratch_.first(bytes);
        copy_strided(into.data(), byte_strides(box.size, size_of(tensor.dtype)), from,
                     stretch.strides, box.size, size_of(tensor.dtype));
        packed = into;
      }
      const auto region = region_of(piece, box);
      const int taken = piece.less - stretch.less;
      if (piece.dtype != tensor.dtype || taken != 0) {
        const auto stored = cast_scratch_.first(region.num_bytes());
        store(tensor, packed, piece, taken, stored, box);
        packed = stored;
      }
      sink_->write(region, packed, owner_.record.written);
    });
  }

  // Packed elements of the tensor as a target piece holds them: in its dtype, less `taken`.
  static void store(const ModelTensor& tensor,
                    std::span<const std::byte> from,
                    const Piece& piece,
                    int taken,
                    std::span<std::byte> into,
                    const Box& box) {
    if (piece.dtype == tensor.dtype) {
      std::ranges::copy(from, into.begin());
    } else {
      convert(tensor.name, tensor.dtype, from, piece.dtype, into, Transform::kCastExact, box);
    }
    if (taken != 0) add_number(piece.dtype, into, -taken);
  }

  static void convert(const std::string& name,
                      DType from_dtype,
                      std::span<const std::byte> from,
                      DType into_dtype,
                      std::span<std::byte> into,
                      Transform transform,
                      const Box& box) {
    require(transform == Transform::kCast || transform == Transform::kCastExact, ErrorKind::kBug,
            "{}: no conversion from {} to {} is planned", name, short_name(from_dtype),
            short_name(into_dtype));
    const auto rule = transform == Transform::kCast ? CastRule::kRound : CastRule::kExact;
    const auto refused = cast(from_dtype, from, into_dtype, into, rule);
    if (!refused) return;
    const auto* element = from.data() + *refused * size_of(from_dtype);
    fail(ErrorKind::kLayout, "{}: {} (an element of {}) {} in {}", name,
         element_value(from_dtype, element), to_string(box),
         rule == CastRule::kRound ? "overflows" : "would be rounded", short_name(into_dtype));
  }

  // Elements of which one side was rounded when something was taken from them are compared so: the
  // way there is one, the way back is not.
  static int comparable_less(int less, const Cover& replica) {
    for (const auto& piece : replica) less = std::max(less, piece.less);
    return less;
  }

  void run_tensor(const Segment& segment, const std::function<void(const Comparison&)>& compared) {
    const auto& planned = plan_.tensors[segment.index];
    const auto bytes = segment.end - segment.begin;
    const auto stretch = make_stretch(planned, segment.begin, segment.end);
    const auto staging = staging_.first(bytes);
    gather(planned.source, stretch, planned.on_read, staging);
    for (std::uint32_t r = 0; r < planned.replicas.size(); ++r) {
      const auto& cover = planned.replicas[r];
      const auto replica = replica_.first(bytes);
      auto compared_as = stretch;
      compared_as.less = comparable_less(stretch.less, cover);
      gather(cover, compared_as, planned.on_read, replica);
      std::span<const std::byte> expected = staging;
      std::vector<std::byte> moved;
      if (compared_as.less != stretch.less) {
        moved.assign(staging.begin(), staging.end());
        add_number(planned.tensor.dtype, moved, stretch.less - compared_as.less);
        expected = moved;
      }
      compared({.tensor = segment.index,
                .replica = r,
                .element = stretch.begin,
                .expected = expected,
                .found = replica,
                .equal = std::memcmp(expected.data(), replica.data(), expected.size()) == 0});
    }
    if (amend_) amend_(segment.index, stretch.begin, staging);
    for (std::int64_t at = 0; at < bytes; at += kDigestBlock) {
      owner_.record.blocks.push_back(digest_block(
          staging.subspan(static_cast<std::size_t>(at),
                          static_cast<std::size_t>(std::min(kDigestBlock, bytes - at)))));
    }
    if (sink_ == nullptr) return;
    for (const auto& cover : planned.targets) scatter(cover, stretch, staging);
  }

  // A piece of a target: each of its intersections with the source's pieces is a copy of its own,
  // into the place where it belongs if the sink has one to give.
  void run_piece(const Segment& segment) {
    const auto& planned = plan_.tensors[segment.index];
    const auto& piece = planned.targets[segment.cover][segment.piece];
    for (auto flat : split_flat_range(piece.box.size, segment.begin, segment.end)) {
      for (int d = 0; d < flat.box.rank(); ++d) flat.box.offset[d] += piece.box.offset[d];
      for (const auto& source : planned.source) {
        const auto box = intersect(source.box, flat.box);
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
    const auto into = leased.empty() ? scratch_.first(region.num_bytes()) : leased;
    const int taken = target.less - planned.less;
    if (target.dtype == tensor.dtype && taken == 0) {
      read_part(tensor, source, planned.less, box, planned.on_read, into);
    } else {
      const auto elements = staging_.first(box.volume() * size_of(tensor.dtype));
      read_part(tensor, source, planned.less, box, planned.on_read, elements);
      store(tensor, elements, target, taken, into, box);
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
      const auto bytes = both->volume() * size_of(tensor.dtype);
      const auto expected = staging_.first(bytes);
      const auto found = replica_.first(bytes);
      read_part(tensor, source, planned.less, *both, planned.on_read, expected);
      const auto less = comparable_less(planned.less, replica);
      if (less != planned.less) add_number(tensor.dtype, expected, planned.less - less);
      read_part(tensor, other, less, *both, planned.on_read, found);
      if (std::ranges::equal(expected, found)) continue;
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
      const auto bytes = scratch_.first(region.num_bytes());
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
      const auto filled = leased.empty() ? scratch_.first(region.num_bytes()) : leased;
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
  Buffer staging_;
  Buffer scratch_;
  Buffer cast_scratch_;
  Buffer replica_;
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
                     const std::function<void(const Comparison&)>& compared) {
  impl_->run(segment, compared);
}

}  // namespace ferry::distckpt
