// A solution is one order of operations, written out here as a loop.
#include "models/kernels/product/unit_triangular.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

namespace ferry::models {
namespace unit_triangular_test {

constexpr std::int64_t kRows = 64;

at::Tensor random_systems() {
  return 0.1 * at::randn({2, 3, kRows, kRows});  // the diagonal and numbers above it are not read
}

float in_lanes(std::int64_t count, const std::function<float(std::int64_t)>& product) {
  float lanes[4] = {};
  const auto whole = count / 4 * 4;
  for (std::int64_t j = 0; j < whole; ++j) lanes[j % 4] += product(j);
  auto sum = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
  for (auto j = whole; j < count; ++j) sum += product(j);
  return sum;
}

at::Tensor by_definition(const at::Tensor& system, const at::Tensor& right, TriangleOrder order) {
  auto x = right.clone();
  const auto of_system = system.accessor<float, 2>();
  auto of_x = x.accessor<float, 2>();
  const auto block = order == TriangleOrder::kBlocks ? 48 : x.size(0);
  for (std::int64_t column = 0; column < x.size(1); ++column) {
    for (std::int64_t i = 0; i < x.size(0); ++i) {
      if (order == TriangleOrder::kLanes) {
        of_x[i][column] -=
            in_lanes(i, [&](std::int64_t j) { return of_system[i][j] * of_x[j][column]; });
        continue;
      }
      const auto own = i / block * block;
      float sum = 0;
      for (std::int64_t j = 0; j < own; ++j) sum = std::fma(of_system[i][j], of_x[j][column], sum);
      float left = of_x[i][column] - sum;
      for (auto j = own; j < i; ++j) left = std::fma(-of_system[i][j], of_x[j][column], left);
      of_x[i][column] = left;
    }
  }
  return x;
}

TEST(UnitTriangular, IsSolvedInOneOrderOnAnyNumberOfThreads) {
  const auto threads = at::get_num_threads();
  at::manual_seed(1);
  const auto systems = random_systems();
  for (const std::int64_t columns : {1, 16, 24, 100}) {
    const auto right = at::randn({2, 3, kRows, columns});
    const auto expected = by_definition(systems[1][2], right[1][2], triangle_order());
    for (const int count : {1, 2, 3, 4, 16}) {
      at::set_num_threads(count);
      const auto solved = solve_unit_triangular(systems, right, Alignment::kBitwise);
      EXPECT_TRUE(at::equal(solved[1][2], expected)) << columns << " columns, " << count;
      const auto alone =
          solve_unit_triangular(systems.select(1, 1), right.select(1, 1), Alignment::kBitwise);
      EXPECT_TRUE(at::equal(alone, solved.select(1, 1))) << columns << " columns, " << count;
      if (triangle_order() != TriangleOrder::kRows && columns > 1) {  // MKL's on any threads
        EXPECT_TRUE(at::equal(solve_unit_triangular(systems, right, Alignment::kFast), solved))
            << columns << " columns, " << count;
      }
    }
  }
  at::set_num_threads(threads);
}

TEST(UnitTriangular, HasTheSolutionAndTheGradientsOfLibTorch) {
  at::manual_seed(2);
  const auto systems = random_systems();
  const auto right = at::randn({2, 3, kRows, 24});
  const auto weights = at::randn({2, 3, kRows, 24});
  std::vector<at::Tensor> results[2];
  for (const auto alignment : {Alignment::kFast, Alignment::kBitwise}) {
    const auto a = systems.clone().requires_grad_();
    const auto b = right.clone().requires_grad_();
    const auto x = solve_unit_triangular(a, b, alignment);
    (x * weights).sum().backward();
    results[alignment == Alignment::kBitwise] = {x.detach(), a.grad().clone(), b.grad().clone()};
  }
  for (std::size_t i = 0; i < 3; ++i) {
    const auto& theirs = results[0][i];
    const auto largest = (results[1][i] - theirs).abs().max().item<double>();
    EXPECT_LT(largest, 1e-5 * theirs.abs().max().item<double>()) << i;
  }
}

}  // namespace unit_triangular_test
}  // namespace ferry::models
