#include "converter/families/module_names.h"

#include <gtest/gtest.h>

namespace ferry::converter {
namespace module_names_test {

TEST(ModuleNames, CountLayersAndExpertsOfTheWholeModel) {
  EXPECT_EQ(key_of_module("decoder.layers.1.mlp.linear_fc1.weight", 4, 8),
            "decoder.layers.5.mlp.linear_fc1.weight");
  EXPECT_EQ(key_of_module("decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight", 2, 8),
            "decoder.layers.2.mlp.experts.experts.11.linear_fc2.weight");
  EXPECT_EQ(key_of_module("decoder.layers.0.mlp.experts.linear_fc1.weight12", 0, 4),
            "decoder.layers.0.mlp.experts.experts.16.linear_fc1.weight");
  EXPECT_EQ(key_of_module("decoder.layers.0.mlp.experts.linear_fc1.weight3_v", 0, 0),
            "decoder.layers.0.mlp.experts.experts.3.linear_fc1.weight_v");
  EXPECT_EQ(key_of_module("mtp.layers.0.mtp_model_layer.mlp.experts.linear_fc2.weight0", 7, 1),
            "mtp.layers.0.transformer_layer.mlp.experts.experts.1.linear_fc2.weight");
}

TEST(ModuleNames, LeaveOthersAlone) {
  for (const char* name :
       {"decoder.final_layernorm.weight", "decoder.layers.weight", "decoder.layers.x.weight",
        "decoder.layers.-1.weight", "decoder.layers.99999999999999999999.weight",
        "embedding.word_embeddings.weight", "decoder.layersx.1.weight", "",
        "a.mlp.experts.experts.3.linear_fc1.weight", "a.mlp.experts.linear_fc1.weight",
        "a.mlp.experts.linear_fc1.weight3_x", "a.mlp.experts.local_experts.x.linear_fc1.weight",
        "a.mlp.shared_experts.linear_fc1.weight"}) {
    EXPECT_EQ(key_of_module(name, 5, 5), name);
  }
}

TEST(ModuleNames, TellExtraStatesApart) {
  EXPECT_TRUE(is_extra_state("decoder.layers.0.mlp.linear_fc1._extra_state"));
  EXPECT_TRUE(is_extra_state("decoder.layers.0.mlp.experts.linear_fc1._extra_state3"));
  EXPECT_FALSE(is_extra_state("decoder.layers.0.mlp.linear_fc1.weight"));
}

}  // namespace module_names_test
}  // namespace ferry::converter
