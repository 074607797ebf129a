// The kernel that chooses experts by sigmoids, against the operations of ATen that it stands for.
#include "models/kernels/experts/sigmoid_choice.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cstdint>

#include "models/cuda_fixture.h"

namespace ferry::models {
namespace {

struct Shape {
  std::int64_t experts = 0;
  SigmoidChoice choice{};
};

class SigmoidChoices : public CudaKernels, public ::testing::WithParamInterface<Shape> {};

// Logits of few values, of which many are equal, and others.
TEST_P(SigmoidChoices, HaveTheBitsAndTheOrderOfAten) {
  const auto& [experts, choice] = GetParam();
  const auto bias = random({experts}, at::kFloat) / 8;
  for (const auto& own_bias : {at::Tensor(), at::round(bias * 16) / 16, bias}) {
    for (const bool few_values : {true, false}) {
      auto logits = random({777, experts}, at::kFloat) * 3;
      if (few_values) logits = at::round(logits);
      const auto scores = at::sigmoid(logits);
      const auto which = experts_by_scores(scores, own_bias, choice);
      const auto weights = weights_by_scores(scores, which, choice);
      const auto name = fmt::format("bias {}, few values {}", own_bias.defined(), few_values);
      const auto chosen = choose_by_sigmoid(logits, own_bias, choice);
      EXPECT_TRUE(at::equal(chosen.experts, which)) << name;
      EXPECT_TRUE(same_bytes(chosen.weights, weights)) << name;
      const auto of_few = choose_by_sigmoid(logits.narrow(0, 5, 3), own_bias, choice);
      EXPECT_TRUE(at::equal(of_few.experts, which.narrow(0, 5, 3))) << name;
      EXPECT_TRUE(same_bytes(of_few.weights, weights.narrow(0, 5, 3))) << name;
    }
  }
  for (const auto alignment : {Alignment::kFast, Alignment::kBitwise})
    EXPECT_TRUE(chooses_by_sigmoid(experts, choice, bias.device(), alignment));
}

// DeepSeek-V3, Kimi K2, GLM-4.5 and its Air, Moonlight, and shapes that nobody has.
INSTANTIATE_TEST_SUITE_P(
    Families,
    SigmoidChoices,
    ::testing::Values(Shape{256, {.topk = 8, .groups = 8, .group_topk = 4, .scaling_factor = 2.5}},
                      Shape{384, {.topk = 8, .scaling_factor = 2.827}},
                      Shape{160, {.topk = 8, .scaling_factor = 2.5}},
                      Shape{128, {.topk = 8}},
                      Shape{64, {.topk = 6, .scaling_factor = 2.446}},
                      Shape{512, {.topk = 22, .groups = 8, .group_topk = 4, .scaling_factor = 5}},
                      Shape{60, {.topk = 1, .groups = 3, .group_topk = 1, .scaling_factor = 0.1}},
                      Shape{8, {.topk = 8, .groups = 4, .group_topk = 4}},
                      Shape{33, {.topk = 32}}),
    [](const auto& test) {
      return fmt::format("{}Of{}In{}", test.param.choice.topk, test.param.experts,
                         test.param.choice.groups);
    });

class SigmoidChoiceLimits : public CudaKernels {};

TEST_F(SigmoidChoiceLimits, AreOfTheKernel) {
  const at::Device gpu(at::kCUDA, 0);
  const auto takes = [&](std::int64_t experts, const SigmoidChoice& choice) {
    return chooses_by_sigmoid(experts, choice, gpu, Alignment::kFast);
  };
  EXPECT_TRUE(takes(512, {.topk = 32}));
  EXPECT_FALSE(takes(513, {.topk = 8}));
  EXPECT_FALSE(takes(512, {.topk = 33}));
  EXPECT_FALSE(takes(8, {.topk = 9}));
  EXPECT_FALSE(takes(64, {.topk = 8, .groups = 64, .group_topk = 8}));
  EXPECT_FALSE(takes(64, {.topk = 9, .groups = 8, .group_topk = 1}));
  EXPECT_FALSE(chooses_by_sigmoid(64, {.topk = 8}, at::Device(at::kCPU), Alignment::kFast));
}

}  // namespace
}  // namespace ferry::models
