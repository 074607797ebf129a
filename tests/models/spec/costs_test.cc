#include "models/spec/costs.h"

#include <gtest/gtest.h>

#include <array>

#include "tests/models/spec/small_model.h"

namespace ferry::models {
namespace costs_test {

// Two layers with delta nets, then one with attention.
TransformerConfig small_hybrid() {
  auto config = kSmallDense;
  config.linear_attention_freq = {true, true, false};
  config.linear_conv_kernel_dim = 3;
  config.linear_key_head_dim = 6;
  config.linear_value_head_dim = 8;
  config.linear_num_key_heads = 2;
  config.linear_num_value_heads = 4;
  config.attention_output_gate = true;
  return config;
}

TEST(Flops, OfADenseModelAreSixATokenAndWeightAndThoseOfAttention) {
  const double weights = 2 * 100 * 10 + 3 * (10 * 20 + 2 * 10 * 10 + 20 * 10 + 3 * 10 * 7);
  EXPECT_EQ(training_flops(kSmallDense, std::array<std::int64_t, 2>{8, 2}),
            6 * 10 * weights + 6.0 * (64 + 4) * 5 * 4 * 3);
  EXPECT_EQ(training_flops(kSmallDense, {}), 0);
}

TEST(Flops, OfSelectiveRecomputationAreAForwardPassOfTheModules) {
  const std::array<std::int64_t, 2> lengths{8, 2};
  EXPECT_EQ(selective_flops(kSmallDense, {.mlp = true}, lengths), 2.0 * 10 * 3 * 3 * 10 * 7);
  EXPECT_EQ(selective_flops(kSmallDense, {.core_attn = true}, lengths), 2.0 * (64 + 4) * 5 * 4 * 3);
  EXPECT_EQ(selective_flops(kSmallDense, {.moe = true, .moe_act = true}, lengths), 0);
}

// verl's _estimate_qwen3_5_flops has the formula.
TEST(Flops, OfAHybridHaveTheRecurrenceOfItsDeltaNets) {
  const double attention = 10 * (2 * 20 + 2 * 10 + 20);
  const double delta_net = 10 * (2 * 12 + 3 * 32 + 2 * 4) + 3 * (2 * 12 + 32);
  const double weights = 2 * 100 * 10 + attention + 2 * delta_net + 3 * 3 * 10 * 7;
  EXPECT_EQ(training_flops(small_hybrid(), std::array<std::int64_t, 2>{8, 2}),
            6 * 10 * weights + 15.0 * 6 * 8 * 4 * 10 * 2 + 6.0 * (64 + 4) * 5 * 4);
}

// Each of two ranks has 28 channels and two heads of 6 x 8.
TEST(LinearStates, AreSharedOutWithTheHeads) {
  const auto config = small_hybrid();
  const auto bytes = [&](Alignment alignment, bool on_host) {
    return linear_state_bytes(config, 2, {.alignment = alignment, .dtype = distckpt::DType::kBF16},
                              on_host);
  };
  const auto channels = 6 + 6 + 16;
  const auto state = 2 * channels * 2 + 2 * 6 * 8 * 4;
  EXPECT_EQ(bytes(Alignment::kFast, true), 2 * state);
  EXPECT_EQ(bytes(Alignment::kBitwise, false), 2 * state);
  EXPECT_EQ(bytes(Alignment::kBitwise, true), 2 * (state + 63 * (channels * 2 + 2 * (2 + 4))));
  EXPECT_EQ(key_value_bytes(config, 1, {.dtype = distckpt::DType::kBF16}), 2 * 2 * 5 * 2);
  EXPECT_EQ(linear_state_slots(config, 20, false).total(), 20 + 1);
  EXPECT_EQ(linear_state_slots(config, 20, true).total(), 20 + 3 + 1);
  EXPECT_EQ(linear_state_slots({.num_layers = 3}, 20, true).total(), 0);
}

TEST(Flops, CountTheExpertsThatATokenMeets) {
  const TransformerConfig config{.num_layers = 2,
                                 .hidden_size = 10,
                                 .ffn_hidden_size = 7,
                                 .num_attention_heads = 1,
                                 .num_query_groups = 1,
                                 .kv_channels = 5,
                                 .vocab_size = 100,
                                 .num_moe_experts = 16,
                                 .moe_layer_freq = {false, true},
                                 .moe_ffn_hidden_size = 3,
                                 .moe_shared_expert_intermediate_size = 4,
                                 .moe_router_topk = 2};
  const double weights =
      2 * 100 * 10 + 2 * (4 * 10 * 5) + 3 * 10 * 7 + 3 * 10 * (2 * 3 + 4) + 10 * 16;
  const std::array<std::int64_t, 1> one{1};
  EXPECT_EQ(training_flops(config, one), 6 * weights + 6 * 5 * 2);
  EXPECT_EQ(selective_flops(config, {.moe = true}, one), 2.0 * (3 * 10 * (2 * 3 + 4) + 10 * 16));
  EXPECT_EQ(selective_flops(config, {.mlp = true}, one), 2.0 * 3 * 10 * 7);
}

TEST(Flops, CountLatentProjections) {
  TransformerConfig config{.num_layers = 1,
                           .hidden_size = 10,
                           .ffn_hidden_size = 7,
                           .num_attention_heads = 2,
                           .vocab_size = 100,
                           .multi_latent_attention = true,
                           .q_lora_rank = 6,
                           .kv_lora_rank = 8,
                           .qk_head_dim = 3,
                           .qk_pos_emb_head_dim = 4,
                           .v_head_dim = 5};
  const double rest = 2 * 100 * 10 + 3 * 10 * 7 + 10 * (8 + 4) + 8 * 2 * (3 + 5) + 2 * 5 * 10;
  const double attention = 3 * (7 + 5) * 2;
  EXPECT_EQ(training_flops(config, std::array<std::int64_t, 1>{1}),
            6 * (rest + 10 * 6 + 6 * 2 * 7) + attention);
  config.q_lora_rank = 0;
  EXPECT_EQ(training_flops(config, std::array<std::int64_t, 1>{1}),
            6 * (rest + 10 * 2 * 7) + attention);
}

// The tower of tests/data/hf_qwen3_vl_deep, as torch's FlopCounterMode counts transformers 5.17's.
TEST(VisionFlops, AreThoseThatTorchCounts) {
  const VisionConfig vision{.depth = 3,
                            .hidden_size = 24,
                            .intermediate_size = 28,
                            .num_heads = 3,
                            .in_channels = 3,
                            .patch_size = 4,
                            .temporal_patch_size = 2,
                            .spatial_merge_size = 2,
                            .out_hidden_size = 40,
                            .num_position_embeddings = 16,
                            .deepstack_visual_indexes = {0, 2}};
  EXPECT_EQ(vision_flops(vision, std::array<std::int64_t, 1>{8}), 1769472);
  EXPECT_EQ(vision_flops(vision, std::array<std::int64_t, 2>{4, 3}), 1405440);
}

}  // namespace costs_test
}  // namespace ferry::models
