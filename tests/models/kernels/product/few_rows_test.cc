// An element is the sum of a warp's lanes, each one chain of fused multiply-adds, written out here
// as a loop.
#include "models/kernels/product/few_rows.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <utility>

#include "models/cuda_fixture.h"
#include "models/kernels/product/linear.h"

namespace ferry::models {
namespace few_rows_test {

constexpr std::size_t kLanes = 32;
constexpr std::int64_t kWide = 8;

class FewRows : public CudaKernels {};

// The product of tensors on the host, fp32, rounded to bf16.
at::Tensor naive(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const auto k = x.size(1);
  auto y = at::empty({x.size(0), weight.size(0)});
  const auto of_x = x.accessor<float, 2>();
  const auto of_weight = weight.accessor<float, 2>();
  auto of_y = y.accessor<float, 2>();
  for (std::int64_t row = 0; row < x.size(0); ++row) {
    for (std::int64_t column = 0; column < weight.size(0); ++column) {
      std::array<float, kLanes> lanes{};
      for (std::int64_t i = 0; i < k; ++i) {
        auto& lane = lanes[static_cast<std::size_t>(i / kWide) % kLanes];
        lane = std::fma(of_x[row][i], of_weight[column][i], lane);
      }
      for (auto half = kLanes / 2; half > 0; half /= 2)
        for (std::size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
      of_y[row][column] = lanes[0] + (bias.defined() ? bias.const_data_ptr<float>()[column] : 0);
    }
  }
  return y.to(at::kBFloat16);
}

TEST_F(FewRows, AddsUpInLanes) {
  for (const auto& [n, k] : {std::pair{1, 8}, {17, 264}, {96, 2048}, {4096, 72}, {4104, 264}}) {
    const auto weight = random({n, k});
    for (std::int64_t rows = 1; rows <= 4; ++rows) {
      const auto x = random({rows, k});
      EXPECT_EQ(few_rows_product_supported(x, weight), rows <= 2 || n < 4096);
      for (const auto& bias : {at::Tensor(), random({n})}) {
        const auto of_host = bias.defined() ? bias.to(at::kCPU, at::kFloat) : bias;
        EXPECT_TRUE(
            at::equal(few_rows_product(x, weight, bias).cpu(),
                      naive(x.to(at::kCPU, at::kFloat), weight.to(at::kCPU, at::kFloat), of_host)))
            << rows << " " << n << " " << k << " " << bias.defined();
      }
    }
  }
}

TEST_F(FewRows, RefusesWhatItsLoadsCannotRead) {
  const auto x = random({1, 64});
  const auto weight = random({16, 64});
  EXPECT_TRUE(few_rows_product_supported(x, weight));
  EXPECT_FALSE(few_rows_product_supported(x.cpu(), weight.cpu()));
  EXPECT_FALSE(few_rows_product_supported(x.to(at::kFloat), weight.to(at::kFloat)));
  EXPECT_FALSE(few_rows_product_supported(random({5, 64}), weight));
  EXPECT_FALSE(few_rows_product_supported(random({0, 64}), weight));
  EXPECT_FALSE(few_rows_product_supported(random({1, 60}), random({16, 60})));
  EXPECT_FALSE(few_rows_product_supported(x, random({64, 16}).t()));
  EXPECT_FALSE(
      few_rows_product_supported(x, random({16 * 64 + 1}).narrow(0, 1, 16 * 64).view({16, 64})));
}

TEST_F(FewRows, ServesFastAlone) {
  const auto x = random({2, 512});
  const auto weight = random({48, 512});
  const auto bias = random({48});
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(
      at::equal(linear(x, weight, bias, Alignment::kFast), few_rows_product(x, weight, bias)));
  const auto bitwise = linear(at::cat({x, x, x}), weight, bias, Alignment::kBitwise);
  EXPECT_TRUE(at::equal(linear(x, weight, bias, Alignment::kBitwise), bitwise.narrow(0, 0, 2)));
}

}  // namespace few_rows_test
}  // namespace ferry::models
