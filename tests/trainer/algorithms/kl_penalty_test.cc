// Estimators of the divergence by hand, and the controller of its factor. The interop suite
// compares the estimators with verl's own functions.
#include "trainer/algorithms/kl_penalty.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/expect.h"

namespace ferry::trainer {
namespace kl_penalty_test {

at::Tensor row(std::initializer_list<float> values) {
  return at::tensor(at::ArrayRef<float>(values), at::kFloat).unsqueeze(0);
}

float estimated(KlEstimator estimator, float logprob, float ref_logprob) {
  return kl_penalty(row({logprob}), row({ref_logprob}), {.estimator = estimator}).item<float>();
}

TEST(KlPenalty, IsTheDifferenceOfLogProbabilities) {
  EXPECT_EQ(estimated(KlEstimator::kK1, -1, -1.5F), 0.5F);
  EXPECT_EQ(estimated(KlEstimator::kKl, -2, -1.5F), -0.5F);
  EXPECT_EQ(estimated(KlEstimator::kAbs, -2, -1.5F), 0.5F);
}

TEST(KlPenalty, IsHalfTheSquare) {
  EXPECT_EQ(estimated(KlEstimator::kK2, -1, -3), 2.0F);
  EXPECT_EQ(estimated(KlEstimator::kMse, -3, -1), 2.0F);
}

TEST(KlPenalty, OfLowVarianceIsNeverNegativeAndBounded) {
  EXPECT_FLOAT_EQ(estimated(KlEstimator::kK3, -1, -1.5F), std::exp(-0.5F) + 0.5F - 1);
  EXPECT_EQ(estimated(KlEstimator::kLowVarKl, -1, -1), 0.0F);
  EXPECT_EQ(estimated(KlEstimator::kLowVarKl, -30, -1), 10.0F);
}

TEST(KlPenalty, StraightThroughHasTheValueOfOneAndTheGradientOfAnother) {
  const auto logprob = row({-1, -2}).requires_grad_();
  const auto ref = row({-1.5, -1});
  const auto k3 = kl_penalty(logprob.detach(), ref, {.estimator = KlEstimator::kK3});
  const auto both =
      kl_penalty(logprob, ref, {.estimator = KlEstimator::kK3, .straight_through = true});
  EXPECT_TRUE(at::allclose(both.detach(), k3, 0, 1e-6));
  both.sum().backward();
  EXPECT_TRUE(at::equal(logprob.grad(), (logprob - ref).detach()));  // of half the square
}

TEST(KlController, KeepsAFixedFactor) {
  KlController controller({.type = KlCtrlType::kFixed, .kl_coef = 0.25});
  controller.update(100, 1000);
  EXPECT_EQ(controller.value(), 0.25);
}

TEST(KlController, MovesByAFifthOfTheShareOfTheHorizonAtMost) {
  KlController controller(
      {.type = KlCtrlType::kAdaptive, .kl_coef = 0.5, .horizon = 100, .target_kl = 0.1});
  controller.update(0.11, 50);  // a tenth above the target, half of the horizon
  EXPECT_DOUBLE_EQ(controller.value(), 0.5 * (1 + 0.1 * 0.5));
  controller.restore(0.5);
  controller.update(100, 50);
  EXPECT_DOUBLE_EQ(controller.value(), 0.5 * (1 + 0.2 * 0.5));
  controller.restore(0.5);
  controller.update(0, 50);
  EXPECT_DOUBLE_EQ(controller.value(), 0.5 * (1 - 0.2 * 0.5));
}

TEST(KlController, RefusesAHorizonAndATargetThatAreNotPositive) {
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"horizon 0"},
                             [] { KlController({.type = KlCtrlType::kAdaptive, .horizon = 0}); }));
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"target_kl -1"}, [] {
    KlController({.type = KlCtrlType::kAdaptive, .target_kl = -1});
  }));
}

TEST(ApplyKlPenalty, TakesTheDivergenceOfAnswersFromTheirRewards) {
  KlController controller({.type = KlCtrlType::kFixed, .kl_coef = 0.5});
  const auto scores = at::tensor({0.F, 1.F, 0.F, 2.F}, at::kFloat).view({2, 2});
  const auto old = at::tensor({-1.F, -2.F, -1.F, -9.F}, at::kFloat).view({2, 2});
  const auto ref = at::tensor({-2.F, -2.F, -3.F, -1.F}, at::kFloat).view({2, 2});
  const auto mask = at::tensor({1, 1, 1, 0}, at::kLong).view({2, 2});
  const auto penalized =
      apply_kl_penalty(scores, old, ref, mask, {.estimator = KlEstimator::kK1}, controller);
  EXPECT_TRUE(at::equal(penalized.token_level_rewards,
                        at::tensor({-0.5F, 1.F, -1.F, 2.F}, at::kFloat).view({2, 2})));
  // The mean over answers of the mean over tokens: (0.5 + 2) / 2.
  EXPECT_NEAR(penalized.metrics.at("actor/reward_kl_penalty"), 1.25, 1e-6);
  EXPECT_EQ(penalized.metrics.at("actor/reward_kl_penalty_coeff"), 0.5);
}

}  // namespace kl_penalty_test
}  // namespace ferry::trainer
