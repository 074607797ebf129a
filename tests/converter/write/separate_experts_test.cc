#include "converter/write/separate_experts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "tests/support/files.h"

namespace ferry::converter {
namespace separate_experts_test {

using distckpt::Shape;

constexpr const char* kTogether = "model.layers.0.mlp.experts.gate_up_proj";  // [4, 64, 24]

Checkpoint opened(const char* name, bool separate = true) {
  auto checkpoint = open(support::test_data(name) / "hf");
  auto tensors = checkpoint.tensors;
  if (separate) separate_experts(checkpoint, tensors);
  EXPECT_EQ(tensors.size(), checkpoint.tensors.size());
  return checkpoint;
}

TEST(SeparateExperts, GivesEachExpertItsBoxOfTheTensorOfAll) {
  const auto checkpoint = opened("hf_qwen3_5_moe");
  EXPECT_FALSE(checkpoint.map.index.contains(kTogether));
  const auto up = checkpoint.map.index.at("model.layers.0.mlp.experts.2.up_proj.weight");
  EXPECT_EQ(checkpoint.tensors[up].shape, (Shape{32, 24}));
  const auto link = std::ranges::find(checkpoint.links.links, up, &distckpt::BoxLink::model);
  ASSERT_NE(link, checkpoint.links.links.end());
  EXPECT_EQ(checkpoint.layout.tensor(link->stored).name, kTogether);
  EXPECT_EQ(to_string(link->stored_box), "[2:3, 32:64, 0:24]");
  EXPECT_EQ(to_string(link->model_box), "[0:32, 0:24]");
}

// The same number of elements is linked as before, and each other tensor to what it was.
TEST(SeparateExperts, LeavesAllOthersAsTheyAre) {
  const auto before = opened("hf_qwen3_5_moe_vl", /*separate=*/false);
  const auto after = opened("hf_qwen3_5_moe_vl");
  EXPECT_GT(after.tensors.size(), before.tensors.size());
  std::int64_t elements = 0;
  for (const auto& link : before.links.links) elements += link.model_box.size.product();
  for (const auto& link : after.links.links) {
    elements -= link.model_box.size.product();
    const auto& stored = after.layout.tensor(link.stored).name;
    const auto& tensor = after.tensors[link.model];
    if (stored.find("mlp.experts.") == std::string::npos) {
      EXPECT_EQ(tensor.name, stored);
    }
  }
  EXPECT_EQ(elements, 0);
}

TEST(SeparateExperts, KeepsWhatHasNoOtherNames) {
  for (const auto* name : {"hf_qwen3_vl_moe", "hf_gpt_oss", "hf_qwen3_moe"})
    EXPECT_EQ(opened(name).tensors.size(), opened(name, /*separate=*/false).tensors.size()) << name;
}

}  // namespace separate_experts_test
}  // namespace ferry::converter
