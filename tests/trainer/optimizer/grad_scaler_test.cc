// The cases of Megatron-Core's DynamicGradScaler.update().
#include "trainer/optimizer/grad_scaler.h"

#include <gtest/gtest.h>

#include "tests/support/expect.h"

namespace ferry::trainer {
namespace grad_scaler_test {

constexpr GradScalerConfig kConfig{
    .initial_loss_scale = 16, .min_loss_scale = 4, .loss_scale_window = 3, .hysteresis = 2};

void update(DynamicGradScaler& scaler, bool found_inf, int times) {
  for (int i = 0; i < times; ++i) scaler.update(found_inf);
}

TEST(DynamicGradScaler, GrowsAfterAWindowWithoutOverflow) {
  DynamicGradScaler scaler(kConfig);
  update(scaler, false, 2);
  EXPECT_EQ(scaler.scale(), 16);
  scaler.update(false);
  EXPECT_EQ(scaler.scale(), 32);
  update(scaler, false, 3);
  EXPECT_EQ(scaler.scale(), 64);
}

TEST(DynamicGradScaler, AnOverflowBeginsTheWindowAnew) {
  DynamicGradScaler scaler(kConfig);
  update(scaler, false, 2);
  scaler.update(true);
  update(scaler, false, 2);
  EXPECT_EQ(scaler.scale(), 16);
}

// The first overflow is put up with, each one behind it halves the scale.
TEST(DynamicGradScaler, ShrinksAfterTheHysteresis) {
  DynamicGradScaler scaler(kConfig);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 16);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 8);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 4);
}

TEST(DynamicGradScaler, NeverShrinksBelowItsLeast) {
  DynamicGradScaler scaler(kConfig);
  update(scaler, true, 9);
  EXPECT_EQ(scaler.scale(), 4);
}

TEST(DynamicGradScaler, PutsUpWithAnOverflowAgainWhenItHasGrown) {
  DynamicGradScaler scaler(kConfig);
  scaler.update(true);
  update(scaler, false, 3);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 32);
}

TEST(DynamicGradScaler, GoesOnFromAState) {
  DynamicGradScaler one(kConfig), other(kConfig);
  update(one, false, 2);
  other.load(one.state());
  other.update(false);
  EXPECT_EQ(other.scale(), 32);
}

TEST(DynamicGradScaler, RefusesScalesThatCannotBeAdapted) {
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"a loss scale of 1, 2 at least"}, [] {
    DynamicGradScaler({.initial_loss_scale = 1, .min_loss_scale = 2});
  }));
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"cannot be adapted"},
                             [] { DynamicGradScaler({.backoff_factor = 1}); }));
}

}  // namespace grad_scaler_test
}  // namespace ferry::trainer
