#include "trainer/metrics/val_metrics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace ferry::trainer {
namespace val_metrics_test {

ValidationSample sample(std::string uid, double reward) {
  return {.data_source = "gsm8k", .uid = std::move(uid), .values = {{"reward", reward}}};
}

TEST(ValidationMetrics, OfOneAnswerAPromptAreTheirMean) {
  EXPECT_EQ(validation_metrics(std::vector{sample("a", 1), sample("b", 0), sample("c", 0.5)}),
            (Metrics{{"val-core/gsm8k/reward/mean@1", 0.5}}));
  EXPECT_TRUE(validation_metrics({}).empty());
}

TEST(ValidationMetrics, AreCoreForTheLargestNumberOfAnswersAndAccuracy) {
  std::vector<ValidationSample> samples;
  for (const int i : {0, 1, 2, 3}) {
    samples.push_back(sample("a", 1));
    samples.back().values["acc"] = i == 0 ? 0.0 : 1.0;
    samples.back().values["pred"] = i == 0 ? "12" : "7";
    samples.push_back({.data_source = "math", .uid = "a", .values = {{"reward", 1.0 * i}}});
  }
  const auto found = validation_metrics(samples);
  EXPECT_EQ(found.at("val-core/gsm8k/acc/mean@4"), 0.75);
  EXPECT_EQ(found.at("val-aux/gsm8k/acc/std@4"), std::sqrt(0.1875));
  EXPECT_EQ(found.at("val-aux/gsm8k/reward/best@4/mean"), 1);
  EXPECT_EQ(found.at("val-aux/gsm8k/reward/best@4/std"), 0);
  EXPECT_EQ(found.at("val-core/math/reward/mean@4"), 1.5);
  EXPECT_TRUE(found.contains("val-aux/math/reward/best@2/mean"));
  EXPECT_TRUE(found.contains("val-aux/math/reward/worst@4/mean"));
  EXPECT_TRUE(found.contains("val-core/math/reward/best@4/std"));
  EXPECT_FALSE(found.contains("val-core/math/reward/maj@4/mean"));
  // A majority of 4 draws of 3 right answers and a wrong one is right more often than one draw.
  EXPECT_GT(found.at("val-core/gsm8k/acc/maj@4/mean"), 0.75);
  EXPECT_GT(found.at("val-core/gsm8k/acc/best@4/mean"), found.at("val-core/gsm8k/acc/maj@4/mean"));
}

// The expectation of the least of k numbers that are 0 or 1, half of each, is 2^-k; a mean of 1000
// draws is off by 0.016 at most in one of three cases.
TEST(ValidationMetrics, DrawEvenly) {
  std::vector<ValidationSample> samples;
  for (int i = 0; i < 8; ++i) samples.push_back(sample("a", i % 2));
  const auto found = validation_metrics(samples);
  EXPECT_NEAR(found.at("val-aux/gsm8k/reward/worst@2/mean"), 0.25, 0.05);
  EXPECT_NEAR(found.at("val-aux/gsm8k/reward/worst@4/mean"), 0.0625, 0.03);
  EXPECT_NEAR(found.at("val-aux/gsm8k/reward/best@2/mean"), 0.75, 0.05);
}

TEST(ValidationMetrics, LeaveOutTexts) {
  std::vector<ValidationSample> samples{sample("a", 1), sample("a", 0)};
  samples[0].values["pred"] = 5.0;
  samples[1].values["pred"] = "none";
  samples[0].values["only here"] = 3.0;
  const auto found = validation_metrics(samples);
  EXPECT_FALSE(found.contains("val-aux/gsm8k/pred/mean@2"));
  EXPECT_EQ(found.at("val-aux/gsm8k/only here/mean@1"), 3);
}

}  // namespace val_metrics_test
}  // namespace ferry::trainer
