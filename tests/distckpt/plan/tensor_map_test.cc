// Links between stored tensors and the model's: padding that becomes a tensor, and parts of a
// model.
#include "distckpt/plan/tensor_map.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

namespace ferry::distckpt {
namespace tensor_map_test {

// "head" [6, 4], of which the model has the first five rows, and "norm" [4], of which it has none.
struct Padded {
  Padded(const std::string& head, std::int64_t rows) {
    layout.add_tensor({.name = head, .shape = {rows, 4}});
    layout.add_tensor({.name = "norm", .shape = {4}});
    const Box used{.offset = {0, 0}, .size = {5, 4}};
    map.links = {{.model = 0, .model_box = used, .stored = 0, .stored_box = used}};
    map.padding = {
        {.stored = 0, .box = {.offset = {5, 0}, .size = {rows - 5, 4}}},
        {.stored = 1, .box = Box::whole({4}), .ones = true},
    };
  }
  Layout layout;
  TensorMap map;
};

std::vector<ModelTensor> model() {
  return {{.name = "lm_head.weight", .shape = {5, 4}}};
}

TEST(PaddingNames, AreThoseOfTheTensorThatIsPaddedOrOfAStoredOneThatHoldsNothing) {
  const Padded padded("output_layer", 6);
  EXPECT_EQ(padding_names(model(), padded.layout, padded.map),
            (std::set<std::string>{"lm_head.weight [5:6, 0:4] (padding)", "norm [0:4] (padding)"}));
}

TEST(PromoteSharedPadding, MakesTensorsOfWhatBothSidesHoldAlone) {
  Padded source("output_layer", 6);
  Padded target("module.output_layer", 8);  // the padding is of another size
  auto tensors = model();
  const auto shared =
      promote_shared_padding(source.layout, source.map, target.layout, target.map, tensors);
  EXPECT_EQ(shared, std::set<std::string>{"norm [0:4] (padding)"});
  ASSERT_EQ(tensors.size(), 2U);
  EXPECT_EQ(tensors[1].name, "norm [0:4] (padding)");
  EXPECT_EQ(tensors[1].role, Role::kPadding);
  for (const auto* side : {&source, &target}) {
    ASSERT_EQ(side->map.padding.size(), 1U);
    EXPECT_EQ(side->map.padding[0].stored, 0U);
    ASSERT_EQ(side->map.links.size(), 2U);
    EXPECT_EQ(side->map.links[1].model, 1U);
    EXPECT_EQ(side->map.links[1].stored, 1U);
  }
}

TEST(RestrictLinks, LeavesOutWhatNoTensorThatIsKeptHolds) {
  Padded padded("output_layer", 6);
  const auto scales = padded.layout.add_tensor({.name = "scales", .shape = {1}});
  padded.map.scales = {{.stored = scales, .block = {6, 4}}};
  padded.map.links[0].scale = 0;
  padded.map.links.push_back(
      {.model = 1, .model_box = Box::whole({4}), .stored = 1, .stored_box = Box::whole({4})});
  padded.map.padding.pop_back();
  restrict_links(padded.map, padded.layout, {std::nullopt, 0});
  ASSERT_EQ(padded.map.links.size(), 1U);
  EXPECT_EQ(padded.map.links[0].model, 0U);
  EXPECT_EQ(padded.map.links[0].stored, 1U);
  EXPECT_TRUE(padded.map.scales.empty());
  EXPECT_TRUE(padded.map.padding.empty());
  std::vector<std::string> left_out;
  for (const auto& box : padded.map.left_out)
    left_out.push_back(padded.layout.tensor(box.stored).name + to_string(box.box));
  EXPECT_EQ(left_out, (std::vector<std::string>{"output_layer[0:5, 0:4]", "scales[0:1]",
                                                "output_layer[5:6, 0:4]"}));
}

TEST(RestrictLinks, NumbersScalesAnew) {
  Layout layout;
  for (const auto* name : {"a", "b", "a_scale", "b_scale"})
    layout.add_tensor({.name = name, .shape = {2}});
  TensorMap map;
  for (std::uint32_t i = 0; i < 2; ++i) {
    map.links.push_back(BoxLink::whole(i, i, {2}));
    map.links.back().scale = static_cast<int>(i);
    map.scales.push_back({.stored = i + 2, .block = {2}});
  }
  restrict_links(map, layout, {std::nullopt, 0});
  ASSERT_EQ(map.scales.size(), 1U);
  EXPECT_EQ(map.scales[0].stored, 3U);
  ASSERT_EQ(map.links.size(), 1U);
  EXPECT_EQ(map.links[0].scale, 0);
}

TEST(ModelTensor, HasOneDimensionMoreWherePartsTakeTurns) {
  const ModelTensor tensor{.name = "gate_up_proj", .shape = {4, 32, 128}, .interleaved = 2};
  EXPECT_EQ(tensor.grid(), (Shape{4, 32, 64, 2}));
  EXPECT_EQ((ModelTensor{.name = "down_proj", .shape = {4, 32}}.grid()), (Shape{4, 32}));
}

}  // namespace tensor_map_test
}  // namespace ferry::distckpt
