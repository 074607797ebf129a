// An element is one sum in one order, written out here as a loop.
#include "models/kernels/product/float_product.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace ferry::models {
namespace float_product_test {

constexpr int kThreads[] = {1, 2, 3, 4, 16};

class FloatProduct : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(1); }
  void TearDown() override { at::set_num_threads(threads_); }

 private:
  int threads_ = at::get_num_threads();
};

at::Tensor naive(const at::Tensor& x,
                 const at::Tensor& weight,
                 const at::Tensor& bias,
                 std::int64_t chain) {
  const auto k = x.size(1);
  auto y = at::empty({x.size(0), weight.size(0)});
  const auto of_x = x.accessor<float, 2>();
  const auto of_weight = weight.accessor<float, 2>();
  auto of_y = y.accessor<float, 2>();
  for (std::int64_t row = 0; row < x.size(0); ++row) {
    for (std::int64_t column = 0; column < weight.size(0); ++column) {
      float total = bias.defined() ? bias.const_data_ptr<float>()[column] : 0.0F;
      for (std::int64_t begin = 0; begin < k; begin += chain) {
        float sum = 0;
        for (auto i = begin; i < std::min(k, begin + chain); ++i)
          sum = std::fma(of_x[row][i], of_weight[column][i], sum);
        total = begin == 0 && !bias.defined() ? sum : total + sum;
      }
      of_y[row][column] = total;
    }
  }
  return y;
}

TEST_F(FloatProduct, AddsUpInChains) {
  struct Shape {
    std::int64_t rows, columns, k, chain;
  };
  for (const auto& [rows, columns, k, chain] :
       {Shape{1, 1, 1, 1}, Shape{7, 17, 192, 192}, Shape{13, 130, 200, 100}, Shape{5, 16, 383, 191},
        Shape{245, 65, 385, 192}, Shape{3, 33, 1000, 192}}) {
    EXPECT_EQ(chain_length(k), chain);
    const auto x = at::randn({rows, k});
    const auto weight = at::randn({columns, k});
    for (const auto& bias : {at::Tensor(), at::randn({columns})}) {
      const auto expected = naive(x, weight, bias, chain);
      for (const int threads : kThreads) {
        at::set_num_threads(threads);
        EXPECT_TRUE(at::equal(float_linear(x, weight, bias, FloatOrder::kChains), expected))
            << rows << "x" << columns << "x" << k << " on " << threads;
      }
    }
  }
}

TEST_F(FloatProduct, AddsUpInFourLanes) {
  const auto x = at::randn({5, 30});
  const auto weight = at::randn({8, 30});
  const auto product = (x.unsqueeze(1) * weight).contiguous();  // [rows, columns, k]
  at::Tensor lanes[4];
  for (std::int64_t i = 0; i < 4; ++i) {
    lanes[i] = product.select(2, i).clone();
    for (auto at = i + 4; at < 28; at += 4) lanes[i] += product.select(2, at);
  }
  const auto expected = ((lanes[0] + lanes[2]) + (lanes[1] + lanes[3])) + product.select(2, 28) +
                        product.select(2, 29);
  EXPECT_TRUE(at::equal(float_linear(x, weight, {}, FloatOrder::kLanes), expected));
}

TEST_F(FloatProduct, ARowHasItsBitsInAnyCompanyAndAnyLayout) {
  const auto x = at::randn({300, 500});
  const auto weight = at::randn({96, 500});
  const auto whole = float_linear(x, weight, {}, FloatOrder::kChains);
  for (const std::int64_t rows : {1, 2, 7, 16, 299}) {
    for (const std::int64_t columns : {1, 8, 24, 96}) {
      const auto part = whole.narrow(0, 300 - rows, rows).narrow(1, 96 - columns, columns);
      EXPECT_TRUE(
          at::equal(float_linear(x.narrow(0, 300 - rows, rows),
                                 weight.narrow(0, 96 - columns, columns), {}, FloatOrder::kChains),
                    part))
          << rows << "x" << columns;
    }
  }
  EXPECT_TRUE(at::equal(
      float_linear(x.t().contiguous().t(), weight.t().contiguous().t(), {}, FloatOrder::kChains),
      whole));
}

TEST_F(FloatProduct, MatricesOfSeveralHeadsAreProductsOfEach) {
  const auto a = at::randn({2, 40, 3, 400}).transpose(1, 2);  // [2, 3, 40, 400]
  const auto b = at::randn({2, 3, 400, 24});
  const auto c = float_matmul(a, b, 192);
  for (std::int64_t i = 0; i < 2; ++i) {
    for (std::int64_t j = 0; j < 3; ++j)
      EXPECT_TRUE(at::equal(c[i][j], naive(a[i][j], b[i][j].t(), {}, 192)));
  }
}

TEST_F(FloatProduct, HasTheGradientsOfTheProductOnAnyNumberOfThreads) {
  const auto x = at::randn({70, 250});
  const auto weight = at::randn({8, 250});
  const auto bias = at::randn({8});
  const auto upstream = at::randn({70, 8});
  for (const auto order : {FloatOrder::kChains, FloatOrder::kLanes}) {
    std::vector<at::Tensor> first;
    for (const int threads : kThreads) {
      at::set_num_threads(threads);
      std::vector<at::Tensor> leaves;
      for (const auto& leaf : {x, weight, bias}) leaves.push_back(leaf.clone().requires_grad_());
      float_linear(leaves[0], leaves[1], leaves[2], order).backward(upstream);
      if (first.empty()) {
        for (const auto& leaf : leaves) first.push_back(leaf.grad());
        const auto wide = upstream.to(at::kDouble);
        EXPECT_TRUE(
            at::allclose(first[0].to(at::kDouble), wide.mm(weight.to(at::kDouble)), 1e-5, 1e-4));
        EXPECT_TRUE(
            at::allclose(first[1].to(at::kDouble), wide.t().mm(x.to(at::kDouble)), 1e-5, 1e-4));
        EXPECT_TRUE(at::allclose(first[2].to(at::kDouble), wide.sum(0), 1e-5, 1e-4));
      }
      for (std::size_t i = 0; i < leaves.size(); ++i)
        EXPECT_TRUE(at::equal(leaves[i].grad(), first[i])) << i << " on " << threads;
    }
  }
}

}  // namespace float_product_test
}  // namespace ferry::models
