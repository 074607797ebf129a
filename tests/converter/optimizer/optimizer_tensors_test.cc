#include "converter/optimizer/optimizer_tensors.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/expect.h"

namespace ferry::converter {
namespace optimizer_tensors_test {

ModelMap map() {
  return make_model_map({.family = "llama",
                         .num_layers = 1,
                         .hidden_size = 8,
                         .ffn_hidden_size = 12,
                         .num_attention_heads = 2,
                         .num_query_groups = 1,
                         .kv_channels = 4,
                         .vocab_size = 10});
}

distckpt::Layout layout_of(const std::vector<std::string>& names) {
  distckpt::Layout layout;
  for (const auto& name : names) layout.add_tensor({.name = name, .shape = {1}, .shards = {}});
  return layout;
}

TEST(OptimizerMap, HasATensorForEachParameter) {
  const auto state = optimizer_map(map(), "exp_avg");
  ASSERT_EQ(state.tensors.size(), map().megatron.size());
  for (const auto& tensor : state.tensors) {
    EXPECT_TRUE(tensor.name.starts_with("optimizer.state.exp_avg.")) << tensor.name;
    EXPECT_EQ(tensor.role, distckpt::Role::kState) << tensor.name;
    EXPECT_EQ(tensor.dtype, distckpt::DType::kF32) << tensor.name;
  }
}

TEST(OptimizerKinds, AreThoseOfTheLayout) {
  const auto layout = layout_of({"decoder.weight", "optimizer.state.param.decoder.weight",
                                 "optimizer.state.exp_avg.decoder.weight"});
  EXPECT_EQ(optimizer_kinds(layout), (std::vector<std::string>{"exp_avg", "param"}));
}

TEST(OptimizerKinds, RefuseOneThatIsNotAdams) {
  EXPECT_TRUE(support::fails(ErrorKind::kLayout, {"momentum", "--no-save-optim"}, [] {
    optimizer_kinds(layout_of({"optimizer.state.momentum.decoder.weight"}));
  }));
}

}  // namespace optimizer_tensors_test
}  // namespace ferry::converter
