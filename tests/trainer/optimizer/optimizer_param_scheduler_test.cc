#include "trainer/optimizer/optimizer_param_scheduler.h"

#include <gtest/gtest.h>

#include <vector>

#include "distckpt/base/error.h"
#include "trainer/engine/run_options.h"

namespace ferry::trainer {
namespace optimizer_param_scheduler_test {

using Config = OptimizerParamSchedulerConfig;

Config config_of(LrDecayStyle style) {
  return {.init_lr = 1e-5,
          .max_lr = 1e-3,
          .min_lr = 1e-4,
          .lr_warmup_steps = 10,
          .lr_decay_steps = 100,
          .lr_decay_style = style,
          .wsd_decay_steps = 20};
}

// At these steps; tests/interop/train/test_trainer.py asks Megatron-Core itself about many more.
const std::vector<std::int64_t> kSteps{0, 5, 10, 11, 55, 90, 100, 101};

void expect_rates(const Config& config, const std::vector<double>& expected) {
  for (std::size_t i = 0; i < kSteps.size(); ++i) {
    OptimizerParamScheduler scheduler(config);
    scheduler.step(kSteps[i]);
    EXPECT_DOUBLE_EQ(scheduler.now().lr, expected[i])
        << name_of(config.lr_decay_style) << " at " << kSteps[i];
  }
}

// The values of megatron-core 0.16.1.
TEST(OptimizerParamScheduler, HasTheRatesOfMegatron) {
  const double warm = 0.00050500000000000002;
  expect_rates(config_of(LrDecayStyle::kConstant),
               {1.0000000000000001e-05, warm, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3});
  expect_rates(config_of(LrDecayStyle::kLinear),
               {1.0000000000000001e-05, warm, 1e-3, 0.00098999999999999999, 0.00055000000000000003,
                0.00020000000000000004, 1e-4, 1e-4});
  expect_rates(config_of(LrDecayStyle::kCosine),
               {1.0000000000000001e-05, warm, 1e-3, 0.0009997258721585931, 0.00055000000000000003,
                0.00012713832064634127, 1e-4, 1e-4});
  expect_rates(config_of(LrDecayStyle::kInverseSquareRoot),
               {1.0000000000000001e-05, warm, 1e-3, 0.0009534625892455924, 0.00042640143271122088,
                0.00033333333333333332, 0.00031622776601683794, 1e-4});
}

TEST(OptimizerParamScheduler, DecaysAtTheEndInEachWayOfWsd) {
  auto config = config_of(LrDecayStyle::kWsd);
  const auto at_90 = [&](auto style) {
    config.lr_wsd_decay_style = style;
    OptimizerParamScheduler scheduler(config);
    scheduler.step(80);
    EXPECT_EQ(scheduler.lr(), 1e-3);
    scheduler.step(10);
    return scheduler.lr();
  };
  EXPECT_DOUBLE_EQ(at_90(WsdDecayStyle::kLinear), 0.00055000000000000003);
  EXPECT_DOUBLE_EQ(at_90(WsdDecayStyle::kCosine), 0.00055000000000000003);
  EXPECT_DOUBLE_EQ(at_90(WsdDecayStyle::kExponential), 0.00047279220613578561);
  EXPECT_DOUBLE_EQ(at_90(WsdDecayStyle::kMinusSqrt), 0.00036360389693210719);
}

TEST(OptimizerParamScheduler, RaisesTheWeightDecayAsMegatronDoes) {
  auto config = config_of(LrDecayStyle::kConstant);
  config.end_wd = 0.1;
  config.wd_incr_steps = 90;
  const auto at_55 = [&](auto style) {
    config.wd_incr_style = style;
    OptimizerParamScheduler scheduler(config);
    EXPECT_DOUBLE_EQ(scheduler.weight_decay(), 0.01);
    scheduler.load(91);
    EXPECT_DOUBLE_EQ(scheduler.weight_decay(), 0.1);
    scheduler.load(55);
    return scheduler.weight_decay();
  };
  EXPECT_DOUBLE_EQ(at_55(WdIncrStyle::kLinear), 0.065000000000000016);
  EXPECT_DOUBLE_EQ(at_55(WdIncrStyle::kCosine), 0.070390906449655108);
}

// verl takes the share of the decay, where that is shorter than the run.
TEST(OptimizerParamScheduler, WarmsUpForAShareOfTheDecay) {
  OptimConfig config{.lr_warmup_steps_ratio = 0.1};
  EXPECT_EQ(scheduler_config(config, 200).lr_warmup_steps, 20);
  EXPECT_EQ(scheduler_config(config, 200).lr_decay_steps, 200);
  config.lr_decay_steps = 50;
  EXPECT_EQ(scheduler_config(config, 200).lr_warmup_steps, 5);
  EXPECT_EQ(scheduler_config(config, 200).lr_decay_steps, 50);
}

TEST(OptimizerParamScheduler, RefusesWhatMakesNoSense) {
  const auto refused = [](Config config) {
    try {
      const OptimizerParamScheduler scheduler(std::move(config));
    } catch (const Error& error) {
      return error.kind() == ErrorKind::kUsage;
    }
    return false;
  };
  EXPECT_TRUE(refused({.max_lr = 1, .min_lr = 2}));
  EXPECT_TRUE(refused({.lr_warmup_steps = 5, .lr_decay_steps = 5}));
  EXPECT_TRUE(refused({.lr_decay_style = LrDecayStyle::kWsd}));
  EXPECT_TRUE(refused({.end_wd = 0.1}));
  EXPECT_TRUE(refused({.start_wd = 0.1,
                       .end_wd = 0.01,
                       .wd_incr_steps = 5,
                       .wd_incr_style = WdIncrStyle::kLinear}));
}

}  // namespace optimizer_param_scheduler_test
}  // namespace ferry::trainer
