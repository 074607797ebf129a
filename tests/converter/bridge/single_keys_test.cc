#include "converter/bridge/single_keys.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace ferry::converter {
namespace single_keys_test {

using distckpt::ShardedTensor;

// A map whose only tensor has that other spelling.
ModelMap map_of(std::string key, std::string also) {
  ModelMap map;
  map.megatron.emplace_back();
  map.megatron.back().key = std::move(key);
  map.megatron.back().also = {std::move(also)};
  return map;
}

ShardedTensor renamed(ShardedTensor tensor, const ModelMap& map = {}) {
  return with_single_keys(map, {{.tensor = std::move(tensor)}}).at(0).tensor;
}

TEST(SingleKeys, TheAxisOfLayersBecomesANumber) {
  const auto tensor = renamed({.key = "decoder.layers.mlp.linear_fc2.weight",
                               .local_shape = {8, 3},
                               .global_shape = {4, 8, 6},
                               .global_offset = {2, 0, 3},
                               .prepend_axis_num = 1});
  EXPECT_EQ(tensor.key, "decoder.layers.2.mlp.linear_fc2.weight");
  EXPECT_EQ(tensor.global_shape, (distckpt::Shape{8, 6}));
  EXPECT_EQ(tensor.global_offset, (distckpt::Dims{0, 3}));
  EXPECT_EQ(tensor.prepend_axis_num, 0);
  EXPECT_EQ(tensor.local_shape, (distckpt::Shape{8, 3}));
}

TEST(SingleKeys, TheAxesOfLayersAndExpertsBecomeTwoNumbers) {
  const auto tensor = renamed({.key = "decoder.layers.mlp.experts.experts.linear_fc1.weight",
                               .local_shape = {8, 3},
                               .global_shape = {4, 16, 8, 3},
                               .global_offset = {1, 7, 0, 0},
                               .prepend_axis_num = 2});
  EXPECT_EQ(tensor.key, "decoder.layers.1.mlp.experts.experts.7.linear_fc1.weight");
  EXPECT_EQ(tensor.global_shape, (distckpt::Shape{8, 3}));
}

TEST(SingleKeys, AnAxisOfExpertsAloneIsTheNumberOfTheExpert) {
  const auto tensor = renamed({.key = "decoder.layers.3.mlp.experts.experts.linear_fc1.weight",
                               .local_shape = {8, 3},
                               .global_shape = {16, 8, 3},
                               .global_offset = {7, 0, 0},
                               .prepend_axis_num = 1});
  EXPECT_EQ(tensor.key, "decoder.layers.3.mlp.experts.experts.7.linear_fc1.weight");
}

TEST(SingleKeys, AnAxisThatCountsNothingKnownStays) {
  const ShardedTensor given{.key = "vision.blocks.weight",
                            .local_shape = {3},
                            .global_shape = {5, 3},
                            .global_offset = {4, 0},
                            .prepend_axis_num = 1};
  const auto tensor = renamed(given);
  EXPECT_EQ(tensor.key, given.key);
  EXPECT_EQ(tensor.prepend_axis_num, 1);
  EXPECT_EQ(tensor.global_offset, given.global_offset);
}

TEST(SingleKeys, WrappersAreTakenOff) {
  EXPECT_EQ(renamed({.key = "module.module.embedding.word_embeddings.weight"}).key,
            "embedding.word_embeddings.weight");
}

TEST(SingleKeys, NamesOfLocalSpecificationsBecomeTransformerEngines) {
  const auto map = map_of("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
                          "decoder.layers.0.input_layernorm.weight");
  EXPECT_EQ(renamed({.key = "decoder.layers.input_layernorm.weight",
                     .local_shape = {8},
                     .global_shape = {2, 8},
                     .global_offset = {0, 0},
                     .prepend_axis_num = 1},
                    map)
                .key,
            "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight");
}

}  // namespace single_keys_test
}  // namespace ferry::converter
