// Seeded random numbers, shapes and tilings. The same on every machine: no distribution of the
// standard library, whose results differ from one to the next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "distckpt/base/box.h"

namespace ferry::support {

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}

  std::uint64_t bits() { return engine_(); }
  std::int64_t between(std::int64_t low, std::int64_t high);  // both included
  bool chance(int percent) { return between(1, 100) <= percent; }
  void fill(std::span<std::byte> bytes);
  std::vector<std::byte> bytes(std::int64_t size);

  template <typename T>
  void shuffle(std::vector<T>& values) {
    for (auto i = static_cast<std::int64_t>(values.size()) - 1; i > 0; --i) {
      std::swap(values[static_cast<std::size_t>(i)],
                values[static_cast<std::size_t>(between(0, i))]);
    }
  }

 private:
  std::mt19937_64 engine_;
};

distckpt::Shape random_shape(Random& random, int rank, std::int64_t low, std::int64_t high);
distckpt::Box random_box(Random& random, const distckpt::Shape& shape);  // not empty

// Cuts the shape in two at a random place, and the parts again: boxes that tile it, in random
// order.
std::vector<distckpt::Box> random_tiling(Random& random, const distckpt::Shape& shape, int cuts);

// Every dimension d cut at random places into counts[d] parts.
std::vector<distckpt::Box> random_grid(Random& random,
                                       const distckpt::Shape& shape,
                                       const distckpt::Dims& counts);

// Every dimension d cut into counts[d] equal parts, row-major: how tensor parallelism cuts.
std::vector<distckpt::Box> even_grid(const distckpt::Shape& shape, const distckpt::Dims& counts);

// The place of the row-major element `index` of `box`.
distckpt::Dims element_of(const distckpt::Box& box, std::int64_t index);

// The row-major index of the element at `at` in `shape`.
std::int64_t index_of(const distckpt::Shape& shape, const distckpt::Dims& at);

bool contains(const distckpt::Box& box, const distckpt::Dims& at);

}  // namespace ferry::support
