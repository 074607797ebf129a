// Products of fp32 matrices on the host, each element added up in one order: on any machine with
// AVX2 and FMA, by any number of threads, whatever stands in other rows and columns. Raw pointers
// only; float_product.h has tensors.
#pragma once

#include <cstdint>

namespace ferry::models::host {

// Terms of a chain of fused multiply-adds. A longer sum is cut into chains, each of which starts
// from zero; their sums are added in order.
inline constexpr std::int64_t kLongestChain = 192;

// c [rows, columns] = a [rows, k] times b [k, columns] plus a bias for each column. Strides are
// counted in elements; columns of c lie next to each other.
struct FloatMatrices {
  const float* a = nullptr;
  std::int64_t a_row = 0;
  std::int64_t a_k = 0;
  const float* b = nullptr;
  std::int64_t b_k = 0;
  std::int64_t b_column = 0;
  const float* bias = nullptr;  // added to the first chain; or null
  float* c = nullptr;
  std::int64_t c_row = 0;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t k = 0;
  std::int64_t chain = kLongestChain;  // terms of each but the last, at most kLongestChain
};

// Part of c.
struct FloatTile {
  std::int64_t row = 0;
  std::int64_t rows = 0;
  std::int64_t column = 0;
  std::int64_t columns = 0;
};

// The system L x = right of a lower triangular matrix with ones on its diagonal: what stands on and
// above that is not read. Strides are counted in elements and may be negative; columns of x lie
// next to each other.
struct UnitTriangle {
  const float* l = nullptr;
  std::int64_t l_row = 0;
  std::int64_t l_column = 0;
  float* x = nullptr;  // [rows, columns]: holds `right`, and then the solution
  std::int64_t x_row = 0;
  std::int64_t rows = 0;  // at most kLongestChain
  std::int64_t columns = 0;
  // A row takes the products with rows of earlier blocks as a chain from zero, which is subtracted,
  // and then those of its own block one by one.
  std::int64_t block = 0;
  // Instead, without FMA: four sums, of every fourth product each with the rows before the last
  // multiple of four, are added as ((0 + 2) + (1 + 3)), then come the products that are left, and
  // the sum is subtracted.
  bool in_lanes = false;
};

bool has_avx2_and_fma();
void multiply_chains(const FloatMatrices& matrices, const FloatTile& tile);

// Computes the tile without FMA and in another order: four sums, of every fourth term each, are
// added as ((0 + 2) + (1 + 3)), and then the terms that are left. The terms of a row of a and of a
// column of b are contiguous.
void multiply_lanes(const FloatMatrices& matrices, const FloatTile& tile);

void solve_triangle(const UnitTriangle& triangle);

}  // namespace ferry::models::host
