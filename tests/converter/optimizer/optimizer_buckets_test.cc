#include "converter/optimizer/optimizer_buckets.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "distckpt/base/error.h"

namespace ferry::converter {
namespace optimizer_buckets_test {

models::TransformerConfig dense() {
  return {.family = "llama",
          .num_layers = 2,
          .hidden_size = 8,
          .ffn_hidden_size = 12,
          .num_attention_heads = 2,
          .num_query_groups = 2,
          .kv_channels = 4,
          .vocab_size = 16,
          .untie_embeddings_and_output_weights = true};
}

std::vector<std::string> keys(const ModelMap& map, const std::vector<BucketParameter>& placed) {
  std::vector<std::string> found;
  for (const auto& parameter : placed) found.push_back(map.megatron[parameter.tensor.megatron].key);
  return found;
}

// Elements of one TP2 rank: output 64, norm 8, and per layer fc2 48, fc1 96, norms 8 and 8, qkv 96,
// proj 32; embedding 64. Each begins at a multiple of 64.
constexpr std::int64_t kLayer = 64 + 128 + 64 + 128 + 64 + 64;
constexpr std::int64_t kAll = 64 + 64 + 2 * kLayer + 64;

TEST(OptimizerBuckets, HoldsParametersInReverseOrderOfRegistration) {
  const auto map = make_model_map(dense());
  const OptimizerBuckets buckets(
      map, {.tensor_model_parallel_size = 2, .make_vocab_size_divisible_by = 1});
  EXPECT_EQ(buckets.num_ranks(ParameterGroup::kDense), 2);
  const auto placed = buckets.place(ParameterGroup::kDense, ExpertOrder::kGrouped, 1, 0, {kAll});
  const std::vector<std::string> expected{
      "output_layer.weight",
      "decoder.final_layernorm.weight",
      "decoder.layers.1.mlp.linear_fc2.weight",
      "decoder.layers.1.mlp.linear_fc1.weight",
      "decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
      "decoder.layers.1.self_attention.linear_qkv.weight",
      "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
      "decoder.layers.1.self_attention.linear_proj.weight"};
  auto found = keys(map, placed);
  found.resize(expected.size());
  EXPECT_EQ(found, expected);
  EXPECT_EQ(keys(map, placed).back(), "embedding.word_embeddings.weight");
  for (const auto& parameter : placed) {
    EXPECT_EQ(parameter.begin % 64, 0);
    // Norms are whole on every tensor parallel rank: on the second one a copy.
    const bool norm = map.megatron[parameter.tensor.megatron].split == Split::kNone;
    EXPECT_EQ(parameter.copy, norm);
  }
  EXPECT_EQ(placed[3].tensor.boxes.size(), 2U);  // gate and up
  EXPECT_EQ(placed[3].begin, 64 + 64 + 64);
}

TEST(OptimizerBuckets, FillsOneBucketAfterTheOther) {
  const auto map = make_model_map(dense());
  const OptimizerBuckets buckets(
      map, {.tensor_model_parallel_size = 2, .make_vocab_size_divisible_by = 1});
  const auto place = [&](const std::vector<std::int64_t>& sizes) {
    return buckets.place(ParameterGroup::kDense, ExpertOrder::kGrouped, 0, 0, sizes);
  };
  // The first ends behind layer 1's fc1 without the alignment, the second takes the rest.
  const std::int64_t first = 64 + 64 + 64 + 96;
  const std::int64_t rest = kAll - (64 + 64 + 64 + 128);
  const auto placed = place({first, rest});
  EXPECT_EQ(placed[4].begin, first);
  EXPECT_EQ(placed.back().begin + placed.back().size, first + rest);
  for (const auto& wrong : std::vector<std::vector<std::int64_t>>{
           {}, {first}, {first, rest, 64}, {first, rest - 64}, {first, rest + 64}, {32, kAll}}) {
    EXPECT_THROW(place(wrong), Error);
  }
}

TEST(OptimizerBuckets, KnowsCopiesOfATiedEmbedding) {
  auto config = dense();
  config.untie_embeddings_and_output_weights = false;
  const auto map = make_model_map(config);
  const OptimizerBuckets buckets(
      map, {.pipeline_model_parallel_size = 2, .make_vocab_size_divisible_by = 1});
  // The last stage: the copy of the embedding has a bucket of its own.
  const std::int64_t layer = 128 + 192 + 64 + 192 + 64 + 64;
  const auto placed =
      buckets.place(ParameterGroup::kDense, ExpertOrder::kGrouped, 1, 0, {128, 64 + layer});
  EXPECT_EQ(keys(map, placed).front(), "embedding.word_embeddings.weight");
  EXPECT_TRUE(placed.front().copy);
  EXPECT_FALSE(placed[1].copy);
}

TEST(OptimizerBuckets, OrdersExpertsAsTheirModulesDo) {
  auto config = dense();
  config.family = "mixtral";
  config.num_moe_experts = 4;
  config.moe_ffn_hidden_size = 12;
  config.moe_layer_freq = {true, true};
  const auto map = make_model_map(config);
  const OptimizerBuckets buckets(map, {.expert_model_parallel_size = 2});
  EXPECT_EQ(buckets.num_ranks(ParameterGroup::kExpert), 2);
  const auto experts = [&](ExpertOrder order) {
    std::vector<std::int64_t> found;
    for (const auto& parameter :
         buckets.place(ParameterGroup::kExpert, order, 1, 0, {4 * 192 + 4 * 128}))
      found.push_back(*map.megatron[parameter.tensor.megatron].expert);
    return found;
  };
  // fc2 of both experts before fc1 of both; or both of the last expert first.
  EXPECT_EQ(experts(ExpertOrder::kGrouped), (std::vector<std::int64_t>{3, 2, 3, 2, 3, 2, 3, 2}));
  EXPECT_EQ(experts(ExpertOrder::kSequential), (std::vector<std::int64_t>{3, 3, 2, 2, 3, 3, 2, 2}));
}

}  // namespace optimizer_buckets_test
}  // namespace ferry::converter
