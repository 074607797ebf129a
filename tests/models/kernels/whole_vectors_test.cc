// An element has the same bits alone and among others, in rows of any width, on any number of
// threads.
#include "models/kernels/whole_vectors.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <ostream>
#include <string>

namespace ferry::models {
namespace whole_vectors_test {

using Function = at::Tensor (*)(const at::Tensor&);

struct Case {
  const char* name;
  Function ours;
  Function theirs;
};

void PrintTo(const Case& one, std::ostream* out) {
  *out << one.name;
}

class WholeVectors : public ::testing::TestWithParam<Case> {
 protected:
  void TearDown() override { at::set_num_threads(1); }
};

at::Tensor numbers(at::ScalarType dtype, std::int64_t rows) {
  at::manual_seed(1);
  return (2 * at::randn({rows, 96})).to(dtype);
}

TEST_P(WholeVectors, GiveAnElementTheSameBitsInAnyCompany) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto x = numbers(dtype, 200);
    const auto whole = GetParam().ours(x);
    for (const std::int64_t width : {1, 3, 8, 16, 24, 32, 48, 95}) {
      for (const std::int64_t begin : {0, 1})  // a strided view
        EXPECT_TRUE(
            at::equal(GetParam().ours(x.narrow(1, begin, width)), whole.narrow(1, begin, width)))
            << dtype << " " << width;
    }
    for (const std::int64_t rows : {1, 2, 7, 199})
      EXPECT_TRUE(at::equal(GetParam().ours(x.narrow(0, 0, rows)), whole.narrow(0, 0, rows)));
  }
}

TEST_P(WholeVectors, GiveTheSameBitsOnAnyNumberOfThreads) {
  const auto x = numbers(at::kFloat, 2777);
  at::set_num_threads(1);
  const auto expected = GetParam().ours(x);
  for (const int threads : {2, 3, 7}) {
    at::set_num_threads(threads);
    EXPECT_TRUE(at::equal(GetParam().ours(x), expected)) << threads;
  }
}

TEST_P(WholeVectors, HaveTheGradientsOfLibTorch) {
  const auto x = numbers(at::kFloat, 5);
  const auto gradient = [&](Function function) {
    const auto leaf = x.clone().requires_grad_();
    function(leaf).square().sum().backward();
    return leaf.grad();
  };
  EXPECT_LT((gradient(GetParam().ours) - gradient(GetParam().theirs)).abs().max().item<float>(),
            1e-5);
}

INSTANTIATE_TEST_SUITE_P(
    ,
    WholeVectors,
    ::testing::Values(
        Case{"silu", silu, at::silu},
        Case{"sigmoid", sigmoid, at::sigmoid},
        Case{"gelu_tanh", gelu_tanh, [](const at::Tensor& x) { return at::gelu(x, "tanh"); }},
        Case{"tanh", models::tanh, at::tanh},
        Case{"softplus", softplus, [](const at::Tensor& x) { return at::softplus(x); }}),
    [](const auto& of) { return std::string(of.param.name); });

}  // namespace whole_vectors_test
}  // namespace ferry::models
