#include "models/spec/roofline.h"

#include <gtest/gtest.h>

#include "tests/models/spec/small_model.h"

namespace ferry::models {
namespace roofline_test {

constexpr double kEndless = 1e300;
// Bytes of bf16: products and norms of each layer, and the last norm; the output layer.
constexpr double kLayers = 2 * (3 * (10 * 20 + 2 * 10 * 10 + 20 * 10 + 3 * 10 * 7 + 2 * 10) + 10);
constexpr double kHead = 2 * 100 * 10;

Roofline roofline(const TransformerConfig& config, DeviceRates rates) {
  return {config, MeshShape({.make_vocab_size_divisible_by = 1}, 1), LayoutOptions{}, rates};
}

TEST(Roofline, AStepReadsEachWeightOnce) {
  const auto found = roofline(kSmallDense, {.bytes_per_second = 10, .flops_per_second = kEndless});
  EXPECT_EQ(found.weight_bytes(), kLayers + kHead);
  EXPECT_DOUBLE_EQ(found.seconds({.rows = 1, .drawn = 1}), (kLayers + kHead) / 10);
  EXPECT_DOUBLE_EQ(found.seconds({.rows = 50, .drawn = 1}), (kLayers + kHead) / 10);
}

TEST(Roofline, RowsWithoutLogitsLeaveTheOutputLayerAlone) {
  const auto found = roofline(kSmallDense, {.bytes_per_second = 10, .flops_per_second = kEndless});
  EXPECT_DOUBLE_EQ(found.seconds({.rows = 4}), kLayers / 10);
}

// Keys and values of 2 groups of 5 channels, in 3 layers.
TEST(Roofline, ReadsTheCacheOfEachToken) {
  const auto found = roofline(kSmallDense, {.bytes_per_second = 10, .flops_per_second = kEndless});
  EXPECT_DOUBLE_EQ(found.seconds({.rows = 1, .cached_keys = 8}),
                   (kLayers + 8 * 2 * 2 * 2 * 5 * 3) / 10);
}

TEST(Roofline, TakesTwoOperationsForEachRowAndWeight) {
  const auto found = roofline(kSmallDense, {.bytes_per_second = kEndless, .flops_per_second = 10});
  EXPECT_DOUBLE_EQ(found.seconds({.rows = 6, .drawn = 2}),
                   2 * (6 * kLayers / 2 + 2 * kHead / 2) / 10);
}

TEST(Roofline, NothingTakesNoTime) {
  EXPECT_EQ(roofline(kSmallDense, {.bytes_per_second = 1, .flops_per_second = 1}).seconds({}), 0);
}

// A row meets 2 of 8 experts: one row reads a quarter of their weights, four rows and more all.
TEST(Roofline, ReadsTheExpertsThatRowsMeet) {
  auto config = kSmallDense;
  config.num_moe_experts = 8;
  config.moe_router_topk = 2;
  config.moe_ffn_hidden_size = 6;
  config.moe_layer_freq = {true, true, true};
  const auto found = roofline(config, {.bytes_per_second = 1, .flops_per_second = kEndless});
  const double experts = 2 * 3 * 8 * 3 * 10 * 6;
  const auto seconds = [&](std::int64_t rows) { return found.seconds({.rows = rows}); };
  EXPECT_DOUBLE_EQ(seconds(4) - seconds(1), experts * 3 / 4);
  EXPECT_DOUBLE_EQ(seconds(9), seconds(4));
}

}  // namespace roofline_test
}  // namespace ferry::models
