#include "tests/support/random_boxes.h"

#include <algorithm>
#include <set>

namespace ferry::support {

using distckpt::Box;
using distckpt::Dims;
using distckpt::Shape;

std::int64_t Random::between(std::int64_t low, std::int64_t high) {
  return low + static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(high - low + 1));
}

void Random::fill(std::span<std::byte> bytes) {
  for (auto& byte : bytes) byte = static_cast<std::byte>(bits() >> 32);
}

std::vector<std::byte> Random::bytes(std::int64_t size) {
  std::vector<std::byte> result(static_cast<std::size_t>(size));
  fill(result);
  return result;
}

Shape random_shape(Random& random, int rank, std::int64_t low, std::int64_t high) {
  Shape shape;
  for (int d = 0; d < rank; ++d) shape.push_back(random.between(low, high));
  return shape;
}

Box random_box(Random& random, const Shape& shape) {
  Box box = Box::whole(shape);
  for (int d = 0; d < shape.rank(); ++d) {
    box.offset[d] = random.between(0, shape[d] - 1);
    box.size[d] = random.between(1, shape[d] - box.offset[d]);
  }
  return box;
}

std::vector<Box> random_tiling(Random& random, const Shape& shape, int cuts) {
  std::vector<Box> boxes{Box::whole(shape)};
  for (int i = 0; i < cuts && shape.rank() > 0; ++i) {
    auto& box = boxes[static_cast<std::size_t>(random.between(0, std::ssize(boxes) - 1))];
    const auto d = static_cast<int>(random.between(0, shape.rank() - 1));
    if (box.size[d] < 2) continue;
    const auto first = random.between(1, box.size[d] - 1);
    Box rest = box;
    rest.offset[d] += first;
    rest.size[d] -= first;
    box.size[d] = first;
    boxes.push_back(rest);
  }
  random.shuffle(boxes);
  return boxes;
}

namespace {

// The boxes between the cuts of each dimension, row-major.
std::vector<Box> boxes_between(const std::vector<std::vector<std::int64_t>>& cuts) {
  std::vector<Box> boxes{Box{}};
  for (const auto& of_dim : cuts) {
    std::vector<Box> longer;
    for (const auto& box : boxes) {
      for (std::size_t c = 0; c + 1 < of_dim.size(); ++c) {
        longer.push_back(box);
        longer.back().offset.push_back(of_dim[c]);
        longer.back().size.push_back(of_dim[c + 1] - of_dim[c]);
      }
    }
    boxes = std::move(longer);
  }
  return boxes;
}

}  // namespace

std::vector<Box> random_grid(Random& random, const Shape& shape, const Dims& counts) {
  std::vector<std::vector<std::int64_t>> cuts;
  for (int d = 0; d < shape.rank(); ++d) {
    std::set<std::int64_t> of_dim{0, shape[d]};
    while (std::ssize(of_dim) < std::min(counts[d], shape[d]) + 1) {
      of_dim.insert(random.between(1, shape[d] - 1));
    }
    cuts.emplace_back(of_dim.begin(), of_dim.end());
  }
  auto boxes = boxes_between(cuts);
  random.shuffle(boxes);
  return boxes;
}

std::vector<Box> even_grid(const Shape& shape, const Dims& counts) {
  std::vector<std::vector<std::int64_t>> cuts(static_cast<std::size_t>(shape.rank()));
  for (int d = 0; d < shape.rank(); ++d) {
    for (std::int64_t i = 0; i <= counts[d]; ++i) {
      cuts[static_cast<std::size_t>(d)].push_back(shape[d] / counts[d] * i);
    }
  }
  return boxes_between(cuts);
}

Dims element_of(const Box& box, std::int64_t index) {
  Dims at = box.offset;
  for (int d = box.rank() - 1; d >= 0; --d) {
    at[d] += index % box.size[d];
    index /= box.size[d];
  }
  return at;
}

std::int64_t index_of(const Shape& shape, const Dims& at) {
  std::int64_t index = 0;
  for (int d = 0; d < shape.rank(); ++d) index = index * shape[d] + at[d];
  return index;
}

bool contains(const Box& box, const Dims& at) {
  for (int d = 0; d < box.rank(); ++d) {
    if (at[d] < box.offset[d] || at[d] >= box.end(d)) return false;
  }
  return true;
}

}  // namespace ferry::support
