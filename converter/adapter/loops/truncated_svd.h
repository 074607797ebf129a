// The best approximation of a matrix by a product of two of low rank: its truncated singular value
// decomposition, by subspace iteration from a fixed start (Halko, Martinsson, Tropp, "Finding
// structure with randomness", SIAM Review 53 (2011), algorithm 4.4).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace ferry::converter {

// matrix = left right + what is left over. Both factors have the singular values' roots.
struct TruncatedSvd {
  std::vector<float> left{};   // [rows, rank]
  std::vector<float> right{};  // [rank, columns]
  // Squares of Frobenius norms: of the matrix, and of what these very factors leave over.
  double matrix_norm = 0;
  double error_norm = 0;
};

// `matrix` is [rows, columns], finite. A rank beyond the smaller dimension is filled up with zeros.
// Iterations end once one takes less than 1e-4 off the squared error, or after 12; a matrix of that
// rank is found up to rounding. Sums are in fp64 and in a fixed order: the result does not depend
// on the number of threads.
TruncatedSvd truncated_svd(std::span<const float> matrix,
                           std::int64_t rows,
                           std::int64_t columns,
                           std::int64_t rank,
                           int threads);

}  // namespace ferry::converter
