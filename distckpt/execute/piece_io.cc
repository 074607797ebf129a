#include "distckpt/execute/piece_io.h"

#include <algorithm>
#include <string>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "distckpt/elements/arithmetic.h"
#include "distckpt/elements/cast.h"
#include "distckpt/elements/dequantize.h"

namespace ferry::distckpt {
namespace {

void convert(const std::string& name,
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

// The bytes between elements, by dimension, where they lie packed in the order of `order`, in which
// `size` is given.
Dims strides_of(const Dims& size, const std::vector<int>& order, std::int64_t element_size) {
  const auto packed = byte_strides(size, element_size);
  auto strides = packed;
  for (int i = 0; i < std::ssize(order); ++i)
    strides[order[static_cast<std::size_t>(i)]] = packed[i];
  return strides;
}

// The element of a tensor that comes `index`-th in a box of its grid whose dimensions are given in
// the order of `order`.
Dims element_of(const ModelTensor& tensor,
                const Box& box,
                const std::vector<int>& order,
                std::int64_t index) {
  Dims element = box.offset;
  for (int i = box.rank() - 1; i >= 0; --i) {
    element[order[static_cast<std::size_t>(i)]] = box.offset[i] + index % box.size[i];
    index /= box.size[i];
  }
  if (tensor.interleaved == 1) return element;
  Dims whole;
  for (int d = 0; d < tensor.shape.rank(); ++d) whole.push_back(element[d]);
  const int last = whole.rank() - 1;
  whole[last] = whole[last] * tensor.interleaved + element[last + 1];
  return whole;
}

}  // namespace

std::span<std::byte> Buffer::first(std::int64_t size) {
  require(size <= static_cast<std::int64_t>(size_), ErrorKind::kBug,
          "a staging buffer of {} bytes was asked for {}", size_, size);
  return {data_, static_cast<std::size_t>(size)};
}

Region region_of(const Piece& piece, const Box& box) {
  return {.at = place(piece, box), .size = box.size, .element_size = size_of(piece.dtype)};
}

void PieceIo::read(const ModelTensor& tensor,
                   const Piece& piece,
                   int less,
                   const Box& box,
                   const std::vector<int>& order,
                   Transform transform,
                   std::span<std::byte> into,
                   std::vector<ChecksumPart>& parts) {
  if (piece.scale >= 0) return dequantize_piece(tensor, piece, box, order, into, parts);
  const auto region = reorder(region_of(piece, box), order);
  const int added = piece.less - less;
  if (piece.dtype == tensor.dtype) {
    source_.read(region, into, parts);
    if (added != 0) add_number(tensor.dtype, into, added);
    return;
  }
  const auto raw = stored_.first(region.num_bytes());
  source_.read(region, raw, parts);
  if (added != 0) {
    add_number(piece.dtype, raw, added);
    transform = Transform::kCast;
  }
  convert(tensor.name, piece.dtype, raw, tensor.dtype, into, transform, box);
}

void PieceIo::write(const ModelTensor& tensor,
                    const Piece& piece,
                    int less,
                    const Box& box,
                    const std::vector<int>& order,
                    std::span<const std::byte> packed,
                    std::vector<ChecksumPart>& parts) {
  const auto region = reorder(region_of(piece, box), order);
  const int taken = piece.less - less;
  if (piece.dtype != tensor.dtype || taken != 0) {
    const auto stored = stored_.first(region.num_bytes());
    store(tensor, packed, piece, taken, stored, box);
    packed = stored;
  }
  sink_->write(region, packed, parts);
}

void PieceIo::store(const ModelTensor& tensor,
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

float PieceIo::read_global(const ScalePiece& scale) {
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
void PieceIo::dequantize_piece(const ModelTensor& tensor,
                               const Piece& piece,
                               const Box& box,
                               const std::vector<int>& wanted,
                               std::span<std::byte> into,
                               std::vector<ChecksumPart>& parts) {
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
  const auto raw = stored_.first(data.num_bytes());
  source_.read(data, raw, parts);

  const auto size = size_of(tensor.dtype);
  const auto from_strides = strides_of(lying.size, order, size);
  const auto into_strides = strides_of(reorder(box.size, wanted), wanted, size);
  bool as_it_lies = lying.volume() == box.volume();
  for (int d = 0; d < box.rank(); ++d)
    as_it_lies = as_it_lies && (box.size[d] == 1 || from_strides[d] == into_strides[d]);
  std::vector<std::byte> values(static_cast<std::size_t>(as_it_lies ? 0 : lying.volume() * size));
  const auto overflow = dequantize(lying, scale.encoding, raw, scales, tensor.dtype,
                                   as_it_lies ? into : std::span(values));
  if (overflow) {
    fail(ErrorKind::kLayout, "{}: element {} overflows {} when dequantised", tensor.name,
         to_string(element_of(tensor, lying, order, *overflow)), short_name(tensor.dtype));
  }
  if (as_it_lies) return;
  std::int64_t first = 0;
  for (int i = 0; i < lying.rank(); ++i) {
    const int d = order[static_cast<std::size_t>(i)];
    first += (box.offset[d] - lying.offset[i]) * from_strides[d];
  }
  copy_strided(into.data(), into_strides, values.data() + first, from_strides, box.size, size);
}

void Slab::begin(const ModelTensor& tensor,
                 const FlatRange& slab,
                 const FlatRange& held,
                 std::vector<int> order) {
  const auto size = size_of(tensor.dtype);
  const auto boxes = split_flat_range(tensor.grid(), slab.begin, slab.end);
  require(boxes.size() == 1, ErrorKind::kBug, "{}: a slab is no box", tensor.name);
  const auto& box = boxes.front().box;
  bytes_ = buffer_.first(box.volume() * size);
  first_ = box.offset;
  strides_ = strides_of(reorder(box.size, order), order, size);
  order_ = std::move(order);
  held_ = held;
}

std::byte* Slab::at(const Dims& element) {
  auto* byte = bytes_.data();
  for (int d = 0; d < element.rank(); ++d) byte += (element[d] - first_[d]) * strides_[d];
  return byte;
}

template <typename Visit>
void Slab::visit_tiles_of(const ModelTensor& tensor,
                          const Cover& cover,
                          const std::vector<int>& order,
                          Visit&& visit) {
  const auto most = kTaskBytes / size_of(tensor.dtype);
  const auto boxes = split_flat_range(tensor.grid(), held_.begin, held_.end);
  for (const auto& piece : cover) {
    for (const auto& flat : boxes) {
      const auto box = intersect(piece.box, flat.box);
      if (box) visit_tiles(*box, order, most, [&](const Box& tile) { visit(piece, tile); });
    }
  }
}

std::span<std::byte> Slab::in_place(const Box& tile,
                                    const std::vector<int>& order,
                                    std::int64_t size) {
  const auto runs = fold_runs({.at = {.strides = reorder(strides_, order)},
                               .size = reorder(tile.size, order),
                               .element_size = size});
  if (runs.num_runs() != 1) return {};
  return {at(tile.offset), static_cast<std::size_t>(tile.volume() * size)};
}

void Slab::load(const ModelTensor& tensor,
                const Cover& cover,
                Transform transform,
                PieceIo& io,
                std::vector<ChecksumPart>& parts) {
  const auto size = size_of(tensor.dtype);
  visit_tiles_of(tensor, cover, order_, [&](const Piece& piece, const Box& tile) {
    const auto place = in_place(tile, order_, size);
    const auto packed = place.empty() ? io.scratch(tile.volume() * size) : place;
    io.read(tensor, piece, 0, tile, order_, transform, packed, parts);
    if (!place.empty()) return;
    copy_strided(at(tile.offset), strides_, packed.data(),
                 strides_of(reorder(tile.size, order_), order_, size), tile.size, size);
  });
}

void Slab::store(const ModelTensor& tensor,
                 const Cover& cover,
                 PieceIo& io,
                 std::vector<ChecksumPart>& parts) {
  const auto size = size_of(tensor.dtype);
  const auto order = order_of(cover);
  visit_tiles_of(tensor, cover, order, [&](const Piece& piece, const Box& tile) {
    auto packed = in_place(tile, order, size);
    if (packed.empty()) {
      packed = io.scratch(tile.volume() * size);
      copy_strided(packed.data(), strides_of(reorder(tile.size, order), order, size),
                   at(tile.offset), strides_, tile.size, size);
    }
    io.write(tensor, piece, 0, tile, order, packed, parts);
  });
}

void Slab::get(const ModelTensor& tensor, const FlatRange& range, std::byte* elements) {
  const auto size = size_of(tensor.dtype);
  const auto strides = byte_strides(tensor.grid(), size);
  for (const auto& flat : split_flat_range(tensor.grid(), range.begin, range.end)) {
    copy_strided(elements + (flat.begin - range.begin) * size, strides, at(flat.box.offset),
                 strides_, flat.box.size, size);
  }
}

void Slab::set(const ModelTensor& tensor, const FlatRange& range, const std::byte* elements) {
  const auto size = size_of(tensor.dtype);
  const auto strides = byte_strides(tensor.grid(), size);
  for (const auto& flat : split_flat_range(tensor.grid(), range.begin, range.end)) {
    copy_strided(at(flat.box.offset), strides_, elements + (flat.begin - range.begin) * size,
                 strides, flat.box.size, size);
  }
}

}  // namespace ferry::distckpt
