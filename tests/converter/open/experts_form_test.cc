#include "converter/open/experts_form.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "converter/convert.h"
#include "distckpt/base/error.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace experts_form_test {

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

// Together again they are linked as they were.
TEST(TakeExpertsForm, PutsTogetherWhatWasTakenApart) {
  const auto together = opened("hf_qwen3_5_moe", /*separate=*/false);
  auto checkpoint = opened("hf_qwen3_5_moe");
  EXPECT_TRUE(take_experts_form(together.map, checkpoint));
  EXPECT_EQ(checkpoint.map.tensors.size(), together.map.tensors.size());
  const auto model = checkpoint.map.index.at(kTogether);
  EXPECT_EQ(checkpoint.tensors[model].shape, (Shape{4, 64, 24}));
  std::int64_t elements = 0;
  for (const auto& link : checkpoint.links.links) {
    if (link.model != model) continue;
    EXPECT_EQ(to_string(link.stored_box), to_string(link.model_box));
    EXPECT_TRUE(link.axes.empty());
    elements += link.model_box.size.product();
  }
  EXPECT_EQ(elements, 4 * 64 * 24);
  EXPECT_FALSE(take_experts_form(together.map, checkpoint));
}

TEST(TakeExpertsForm, TurnsExpertsThatLieTransposed) {
  const std::string name = "model.language_model.layers.0.mlp.experts.down_proj";
  auto checkpoint = opened("hf_qwen3_vl_moe", /*separate=*/false);
  const auto hub = checkpoint.tensors[checkpoint.map.index.at(name)].shape;
  const Shape turned{hub[0], hub[2], hub[1]};
  const auto like = make_model_map(checkpoint.map.config, [&](const std::string& one) {
    return one == name ? std::optional(turned) : std::nullopt;
  });
  EXPECT_TRUE(take_experts_form(like, checkpoint));
  const auto model = checkpoint.map.index.at(name);
  EXPECT_EQ(checkpoint.tensors[model].shape, turned);
  const auto link = std::ranges::find(checkpoint.links.links, model, &distckpt::BoxLink::model);
  ASSERT_NE(link, checkpoint.links.links.end());
  EXPECT_EQ(link->axes, (distckpt::Dims{2, 1}));
  EXPECT_EQ(link->stored_box.size, (Shape{1, hub[1], hub[2]}));
  EXPECT_EQ(link->model_box.size, (Shape{1, turned[1], turned[2]}));
}

// Scales lie where the blocks of the weights do.
TEST(TakeExpertsForm, LeavesExpertsThatAreQuantised) {
  const support::TempDir dir;
  convert({.from = support::test_data("hf_qwen3_5_moe") / "hf",
           .to = dir / "fp8",
           .format = Format::kHuggingFace,
           .quantize = Quantization::Method::kFp8,
           .threads = 1});
  const auto together = opened("hf_qwen3_5_moe", /*separate=*/false);
  auto apart = open(dir / "fp8");
  const auto num_links = apart.links.links.size();
  EXPECT_TRUE(support::fails(ErrorKind::kLayout, {"quantised", "another form"},
                             [&] { take_experts_form(together.map, apart); }));
  EXPECT_EQ(apart.links.links.size(), num_links);
  EXPECT_FALSE(apart.map.index.contains(kTogether));
}

}  // namespace experts_form_test
}  // namespace ferry::converter
