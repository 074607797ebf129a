#include "converter/adapter/loops/truncated_svd.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace ferry::converter {
namespace truncated_svd_test {

std::vector<float> random_matrix(std::int64_t rows, std::int64_t columns, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> matrix(static_cast<std::size_t>(rows * columns));
  for (auto& value : matrix) value = normal(generator);
  return matrix;
}

std::vector<float> product(const std::vector<float>& left,
                           const std::vector<float>& right,
                           std::int64_t rows,
                           std::int64_t rank) {
  const auto columns = std::ssize(right) / rank;
  std::vector<float> matrix(static_cast<std::size_t>(rows * columns));
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) {
      double sum = 0;
      for (std::int64_t k = 0; k < rank; ++k)
        sum += static_cast<double>(left[static_cast<std::size_t>(i * rank + k)]) *
               static_cast<double>(right[static_cast<std::size_t>(k * columns + j)]);
      matrix[static_cast<std::size_t>(i * columns + j)] = static_cast<float>(sum);
    }
  }
  return matrix;
}

// Singular values 1, 1/2, 1/4, ... in bases that reflections turn.
std::vector<float> geometric_matrix(std::int64_t rows, std::int64_t columns) {
  const auto u = random_matrix(rows, 1, 7);
  const auto v = random_matrix(columns, 1, 8);
  const auto norm = [](const std::vector<float>& x) {
    double sum = 0;
    for (const auto value : x) sum += static_cast<double>(value) * static_cast<double>(value);
    return sum;
  };
  const auto reflection = [](const std::vector<float>& x, double squared, std::int64_t i,
                             std::int64_t k) {
    return (i == k ? 1 : 0) - 2 * static_cast<double>(x[static_cast<std::size_t>(i)]) *
                                  static_cast<double>(x[static_cast<std::size_t>(k)]) / squared;
  };
  const auto uu = norm(u);
  const auto vv = norm(v);
  std::vector<float> matrix;
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) {
      double sum = 0;
      for (std::int64_t k = 0; k < std::min(rows, columns); ++k)
        sum +=
            std::exp2(-static_cast<double>(k)) * reflection(u, uu, i, k) * reflection(v, vv, j, k);
      matrix.push_back(static_cast<float>(sum));
    }
  }
  return matrix;
}

}  // namespace truncated_svd_test

using truncated_svd_test::geometric_matrix;
using truncated_svd_test::product;
using truncated_svd_test::random_matrix;

TEST(TruncatedSvd, FindsAProductOfItsRankUpToRounding) {
  const auto matrix = product(random_matrix(300, 5, 1), random_matrix(5, 517, 2), 300, 5);
  const auto svd = truncated_svd(matrix, 300, 517, 5, 2);
  EXPECT_LT(svd.error_norm, 1e-13 * svd.matrix_norm);
  const auto found = product(svd.left, svd.right, 300, 5);
  for (std::size_t i = 0; i < matrix.size(); ++i) ASSERT_NEAR(found[i], matrix[i], 1e-5F);
}

TEST(TruncatedSvd, LeavesTheSingularValuesBeyondTheRank) {
  const auto matrix = geometric_matrix(90, 70);
  const auto svd = truncated_svd(matrix, 90, 70, 3, 1);
  EXPECT_NEAR(svd.matrix_norm, 4.0 / 3, 1e-6);
  EXPECT_NEAR(svd.error_norm, 4.0 / 3 / 64, 1e-6);  // 1/64 + 1/256 + ...
}

TEST(TruncatedSvd, DoesNotDependOnTheNumberOfThreads) {
  const auto matrix = random_matrix(700, 600, 3);
  const auto one = truncated_svd(matrix, 700, 600, 8, 1);
  const auto three = truncated_svd(matrix, 700, 600, 8, 3);
  EXPECT_EQ(one.left, three.left);
  EXPECT_EQ(one.right, three.right);
  EXPECT_EQ(one.error_norm, three.error_norm);
}

TEST(TruncatedSvd, FillsARankBeyondTheMatrixWithZeros) {
  const auto matrix = random_matrix(4, 30, 5);
  const auto svd = truncated_svd(matrix, 4, 30, 6, 1);
  EXPECT_LT(svd.error_norm, 1e-12 * svd.matrix_norm);
  for (std::size_t j = 120; j < svd.right.size(); ++j) ASSERT_EQ(svd.right[j], 0);
}

TEST(TruncatedSvd, GivesZerosForZeros) {
  const auto svd = truncated_svd(std::vector<float>(12), 3, 4, 2, 1);
  EXPECT_EQ(svd.left, std::vector<float>(6));
  EXPECT_EQ(svd.error_norm, 0);
}

}  // namespace ferry::converter
