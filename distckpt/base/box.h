// A Box is an axis-aligned part of a tensor: an offset and a size in each dimension. Everything
// this program moves is a Box.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace ferry::distckpt {

// The most dimensions a tensor may have: layer, expert, two of a matrix, and two to spare.
inline constexpr int kMaxRank = 6;

// Dimensions, outermost first: a shape, an offset or strides. A value type that never allocates.
class Dims {
 public:
  Dims() = default;
  Dims(std::initializer_list<std::int64_t> values);
  explicit Dims(std::span<const std::int64_t> values);  // throws Error(kLayout) above kMaxRank
  static Dims filled(int rank, std::int64_t value);

  int rank() const { return rank_; }
  bool empty() const { return rank_ == 0; }
  std::int64_t operator[](int dim) const { return values_[static_cast<std::size_t>(dim)]; }
  std::int64_t& operator[](int dim) { return values_[static_cast<std::size_t>(dim)]; }
  void push_back(std::int64_t value);
  void push_front(std::int64_t value);

  auto begin() const { return values_.begin(); }
  auto end() const { return values_.begin() + rank_; }

  Dims drop_front(int count) const;
  std::int64_t product() const;  // 1 for rank 0; callers validate against overflow first
  bool operator==(const Dims& other) const;
  std::strong_ordering operator<=>(const Dims& other) const;

 private:
  std::array<std::int64_t, kMaxRank> values_{};
  int rank_ = 0;
};

using Shape = Dims;

std::string to_string(const Dims& dims);  // "[2, 3]"

// The number of elements, or nothing if a dimension is negative or the product overflows int64.
std::optional<std::int64_t> checked_volume(const Shape& shape);

Dims row_major_strides(const Shape& shape);  // in elements
// The coordinates of an element, by its row-major index.
Dims coordinates_of(const Shape& shape, std::int64_t index);

struct Box {
  Dims offset{};
  Dims size{};

  static Box whole(const Shape& shape) { return {Dims::filled(shape.rank(), 0), shape}; }

  int rank() const { return size.rank(); }
  std::int64_t volume() const { return size.product(); }
  bool empty() const { return volume() == 0; }
  std::int64_t end(int dim) const { return offset[dim] + size[dim]; }
  bool inside(const Shape& shape) const;
  bool operator==(const Box&) const = default;
};

std::string to_string(const Box& box);  // "[0:2, 4:8]"

// Boxes of equal rank. Nothing where they share no element.
std::optional<Box> intersect(const Box& a, const Box& b);

// The parts of `box` outside `hole`, disjoint, at most two per dimension.
std::vector<Box> subtract(const Box& box, const Box& hole);

// The boxes that a row-major range [begin, end) of the elements of `shape` consists of, in order:
// at most 2 * rank - 1 of them, each of which is contiguous in row-major order. This is how flat
// ranges (optimizer buckets) and blocks of bytes become boxes.
struct FlatPiece {
  Box box{};
  std::int64_t begin = 0;  // row-major index of its first element in `shape`
};
std::vector<FlatPiece> split_flat_range(const Shape& shape, std::int64_t begin, std::int64_t end);

// Two boxes of equal volume whose sizes are the same once leading ones are dropped: an element of
// one is an element of the other. Translates a part of `from` into the same part of `to`.
Box translate(const Box& part, const Box& from, const Box& to);

// True if `a` and `b` have the same sizes once leading ones are dropped.
bool same_extents(const Shape& a, const Shape& b);

}  // namespace ferry::distckpt
