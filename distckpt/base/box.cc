#include "distckpt/base/box.h"

#include <algorithm>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"

namespace ferry::distckpt {

Dims::Dims(std::initializer_list<std::int64_t> values)
    : Dims(std::span(values.begin(), values.size())) {}

Dims::Dims(std::span<const std::int64_t> values) {
  require(values.size() <= kMaxRank, ErrorKind::kLayout, "{} dimensions, at most {} are handled",
          values.size(), kMaxRank);
  std::ranges::copy(values, values_.begin());
  rank_ = static_cast<int>(values.size());
}

Dims Dims::filled(int rank, std::int64_t value) {
  Dims dims;
  for (int d = 0; d < rank; ++d) dims.push_back(value);
  return dims;
}

void Dims::push_back(std::int64_t value) {
  require(rank_ < kMaxRank, ErrorKind::kLayout, "more than {} dimensions", kMaxRank);
  values_[static_cast<std::size_t>(rank_++)] = value;
}

void Dims::push_front(std::int64_t value) {
  push_back(0);
  std::shift_right(values_.begin(), values_.begin() + rank_, 1);
  values_[0] = value;
}

Dims Dims::drop_front(int count) const {
  return Dims(std::span(values_).subspan(static_cast<std::size_t>(count),
                                         static_cast<std::size_t>(rank_ - count)));
}

std::int64_t Dims::product() const {
  std::int64_t product = 1;
  for (const auto value : *this) product *= value;
  return product;
}

bool Dims::operator==(const Dims& other) const {
  return std::ranges::equal(*this, other);
}

std::strong_ordering Dims::operator<=>(const Dims& other) const {
  return std::lexicographical_compare_three_way(begin(), end(), other.begin(), other.end());
}

std::string to_string(const Dims& dims) {
  return fmt::format("[{}]", fmt::join(dims.begin(), dims.end(), ", "));
}

std::optional<std::int64_t> checked_volume(const Shape& shape) {
  // The product of the dimensions that are not zero: strides must not overflow either, wherever a
  // zero stands.
  std::int64_t volume = 1;
  bool empty = false;
  for (const auto value : shape) {
    if (value == 0) {
      empty = true;
    } else if (value < 0 || __builtin_mul_overflow(volume, value, &volume)) {
      return std::nullopt;
    }
  }
  return empty ? 0 : volume;
}

Dims row_major_strides(const Shape& shape) {
  Dims strides = Dims::filled(shape.rank(), 1);
  for (int d = shape.rank() - 2; d >= 0; --d) strides[d] = strides[d + 1] * shape[d + 1];
  return strides;
}

Dims coordinates_of(const Shape& shape, std::int64_t index) {
  auto at = Dims::filled(shape.rank(), 0);
  for (int d = shape.rank() - 1; d >= 0; --d) {
    at[d] = index % shape[d];
    index /= shape[d];
  }
  return at;
}

bool Box::inside(const Shape& shape) const {
  if (rank() != shape.rank() || offset.rank() != shape.rank()) return false;
  for (int d = 0; d < rank(); ++d) {
    // Compared without adding, so that no offset overflows.
    if (offset[d] < 0 || size[d] < 0 || offset[d] > shape[d] || size[d] > shape[d] - offset[d]) {
      return false;
    }
  }
  return true;
}

std::string to_string(const Box& box) {
  std::string text = "[";
  for (int d = 0; d < box.rank(); ++d) {
    std::int64_t end = 0;  // of a box that is refused it may overflow
    const bool overflows = __builtin_add_overflow(box.offset[d], box.size[d], &end);
    text += fmt::format("{}{}:", d > 0 ? ", " : "", box.offset[d]);
    text += overflows ? fmt::format("+{}", box.size[d]) : fmt::format("{}", end);
  }
  return text + "]";
}

std::optional<Box> intersect(const Box& a, const Box& b) {
  if (a.rank() != b.rank())
    fail(ErrorKind::kBug, "boxes {} and {} differ in rank", to_string(a), to_string(b));
  Box both = a;
  for (int d = 0; d < a.rank(); ++d) {
    const auto begin = std::max(a.offset[d], b.offset[d]);
    const auto end = std::min(a.end(d), b.end(d));
    if (begin >= end) return std::nullopt;
    both.offset[d] = begin;
    both.size[d] = end - begin;
  }
  return both;
}

std::vector<Box> subtract(const Box& box, const Box& hole) {
  const auto both = intersect(box, hole);
  if (!both) return {box};
  std::vector<Box> parts;
  Box rest = box;
  for (int d = 0; d < box.rank(); ++d) {
    Box before = rest;
    before.size[d] = both->offset[d] - rest.offset[d];
    Box after = rest;
    after.offset[d] = both->end(d);
    after.size[d] = rest.end(d) - both->end(d);
    for (const auto& part : {before, after}) {
      if (!part.empty()) parts.push_back(part);
    }
    rest.offset[d] = both->offset[d];
    rest.size[d] = both->size[d];
  }
  return parts;
}

namespace {

// Appends the pieces of [begin, end) inside the sub-tensor `prefix`, whose dimensions from `dim` on
// are free.
void split_flat(const Shape& shape,
                const Dims& strides,
                int dim,
                Box prefix,
                std::int64_t base,
                std::int64_t begin,
                std::int64_t end,
                std::vector<FlatPiece>& pieces) {
  if (begin >= end) return;
  const auto stride = strides[dim];
  const auto first_whole = ceil_div(begin - base, stride);
  const auto end_whole = (end - base) / stride;
  const auto descend = [&](std::int64_t index, std::int64_t from, std::int64_t to) {
    Box inner = prefix;
    inner.offset[dim] = index;
    inner.size[dim] = 1;
    split_flat(shape, strides, dim + 1, inner, base + index * stride, from, to, pieces);
  };
  if (first_whole > end_whole) {  // begin and end lie inside one row
    descend(end_whole, begin, end);
    return;
  }
  if (begin < base + first_whole * stride) {
    descend(first_whole - 1, begin, base + first_whole * stride);
  }
  if (first_whole < end_whole) {
    Box rows = prefix;
    rows.offset[dim] = first_whole;
    rows.size[dim] = end_whole - first_whole;
    pieces.push_back({.box = rows, .begin = base + first_whole * stride});
  }
  if (base + end_whole * stride < end) descend(end_whole, base + end_whole * stride, end);
}

}  // namespace

std::vector<FlatPiece> split_flat_range(const Shape& shape, std::int64_t begin, std::int64_t end) {
  std::vector<FlatPiece> pieces;
  const auto whole = Box::whole(shape);
  if (begin < 0 || begin > end || end > whole.volume()) {
    fail(ErrorKind::kLayout, "range {}:{} leaves a tensor of shape {}", begin, end,
         to_string(shape));
  }
  if (begin == end) return pieces;
  if (shape.empty()) return {{.box = whole, .begin = 0}};
  split_flat(shape, row_major_strides(shape), 0, whole, 0, begin, end, pieces);
  return pieces;
}

namespace {

// The number of leading ones, but for a size of nothing but ones as many as leave `keep`
// dimensions.
int leading_ones(const Shape& shape) {
  int count = 0;
  while (count < shape.rank() && shape[count] == 1) ++count;
  return count;
}

}  // namespace

bool same_extents(const Shape& a, const Shape& b) {
  return a.drop_front(leading_ones(a)) == b.drop_front(leading_ones(b));
}

Box translate(const Box& part, const Box& from, const Box& to) {
  if (!same_extents(from.size, to.size))
    fail(ErrorKind::kBug, "{} cannot be laid over {}", to_string(from), to_string(to));
  Box result = to;
  // Aligned at the last dimension; dimensions that only one of the two has are of size one.
  for (int d = 1; d <= std::min(from.rank(), to.rank()); ++d) {
    const int f = from.rank() - d;
    const int t = to.rank() - d;
    result.offset[t] = to.offset[t] + part.offset[f] - from.offset[f];
    result.size[t] = part.size[f];
  }
  return result;
}

}  // namespace ferry::distckpt
