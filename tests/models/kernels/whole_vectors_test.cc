// An element has the same bits alone and among others, in rows of any width, on any number of
// threads.
#include "models/kernels/whole_vectors.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

namespace ferry::models {
namespace whole_vectors_test {

using Function = at::Tensor (*)(const at::Tensor&);

at::Tensor theirs_of_softplus(const at::Tensor& x) {
  return at::softplus(x);
}

class WholeVectors : public ::testing::TestWithParam<Function> {
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
    const auto whole = GetParam()(x);
    for (const std::int64_t width : {1, 3, 8, 16, 24, 32, 48, 95}) {
      for (const std::int64_t begin : {0, 1})  // a strided view
        EXPECT_TRUE(at::equal(GetParam()(x.narrow(1, begin, width)), whole.narrow(1, begin, width)))
            << dtype << " " << width;
    }
    for (const std::int64_t rows : {1, 2, 7, 199})
      EXPECT_TRUE(at::equal(GetParam()(x.narrow(0, 0, rows)), whole.narrow(0, 0, rows)));
  }
}

TEST_P(WholeVectors, GiveTheSameBitsOnAnyNumberOfThreads) {
  const auto x = numbers(at::kFloat, 2777);
  at::set_num_threads(1);
  const auto expected = GetParam()(x);
  for (const int threads : {2, 3, 7}) {
    at::set_num_threads(threads);
    EXPECT_TRUE(at::equal(GetParam()(x), expected)) << threads;
  }
}

TEST_P(WholeVectors, HaveTheGradientsOfLibTorch) {
  const auto x = numbers(at::kFloat, 5);
  const auto gradient = [&](Function function) {
    const auto leaf = x.clone().requires_grad_();
    function(leaf).square().sum().backward();
    return leaf.grad();
  };
  const Function theirs = GetParam() == Function{silu}      ? Function{at::silu}
                          : GetParam() == Function{sigmoid} ? Function{at::sigmoid}
                                                            : Function{theirs_of_softplus};
  EXPECT_LT((gradient(GetParam()) - gradient(theirs)).abs().max().item<float>(), 1e-5);
}

INSTANTIATE_TEST_SUITE_P(,
                         WholeVectors,
                         ::testing::Values(Function{silu}, Function{sigmoid}, Function{softplus}),
                         [](const auto& of) {
                           return of.param == Function{silu}      ? "silu"
                                  : of.param == Function{sigmoid} ? "sigmoid"
                                                                  : "softplus";
                         });

}  // namespace whole_vectors_test
}  // namespace ferry::models
