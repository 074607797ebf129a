#include "converter/write/requantized_blocks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "converter/convert.h"
#include "distckpt/execute/file_box_io.h"
#include "tests/support/expect.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace requantized_blocks_test {

constexpr std::string_view kUp = "model.layers.1.mlp.up_proj.weight";  // [24, 16]

class RequantizedBlocksTest : public testing::Test {
 protected:
  RequantizedBlocksTest() {
    support::write_tiny_model({}, dir_ / "hf", 1);
    convert({.from = dir_ / "hf",
             .to = dir_ / "fp8",
             .format = Format::kHuggingFace,
             .quantize = Quantization::Method::kFp8});
    checkpoint_ = open(dir_ / "fp8", {.keep_quantized = true});
    const auto found = std::ranges::find(checkpoint_.tensors, kUp, &distckpt::ModelTensor::name);
    weight_ = static_cast<std::uint32_t>(found - checkpoint_.tensors.begin());
  }

  std::shared_ptr<RequantizedBlocks> replace(float factor, const distckpt::Dims& block) {
    return RequantizedBlocks::replace(checkpoint_, {weight_}, block,
                                      [=, this](auto tensor, auto element, auto values) {
                                        EXPECT_EQ(tensor, weight_);
                                        EXPECT_EQ(element, 0);
                                        for (auto& value : values) value *= factor;
                                      });
  }

  support::TempDir dir_;
  Checkpoint checkpoint_{};
  std::uint32_t weight_ = 0;
};

TEST_F(RequantizedBlocksTest, CountsRowsThatNobodyHasRead) {
  const auto blocks = replace(2, {128, 128});
  const auto counts = blocks->count(*checkpoint_.source(), 2);
  EXPECT_EQ(counts.num_elements, 24 * 16);
  EXPECT_EQ(counts.num_changed + counts.num_vanished, 24 * 16);
  EXPECT_GT(counts.num_changed, 300);
  EXPECT_EQ(counts.num_rescaled, 1);
}

TEST_F(RequantizedBlocksTest, SaysWhatAThreadTakes) {
  EXPECT_EQ(replace(2, {128, 128})->thread_memory(), 24 * 16 * (3 + 3 * 4) + 3 * 4);
}

TEST_F(RequantizedBlocksTest, ChangesTooSmallForThreeBitsVanish) {
  const auto counts = replace(1.001F, {128, 128})->count(*checkpoint_.source(), 1);
  EXPECT_EQ(counts.num_changed, 0);
  EXPECT_GT(counts.num_vanished, 300);
  EXPECT_EQ(counts.num_rescaled, 0);
}

TEST_F(RequantizedBlocksTest, EveryElementIsReadOnceInAPlan) {
  const auto blocks = replace(2, {128, 128});
  EXPECT_NO_THROW(distckpt::plan_read(checkpoint_.tensors, checkpoint_.side()));
}

TEST_F(RequantizedBlocksTest, NamesScalesThatAreNotThoseOfItsBlocks) {
  EXPECT_TRUE(support::fails(ErrorKind::kLayout, {"up_proj.weight_scale_inv", "[3, 2]"}, [&] {
    replace(2, {8, 8});
  }));
}

}  // namespace requantized_blocks_test
}  // namespace ferry::converter
