// Adapters there and back: split out of two checkpoints, converted between forms, merged again.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "converter/adapter/adapter_changes.h"
#include "converter/adapter/convert_adapter.h"
#include "converter/adapter/factors/lora_settings.h"
#include "converter/adapter/merge_adapter.h"
#include "converter/adapter/split_adapter.h"
#include "converter/inspect.h"
#include "converter/open/checkpoint.h"
#include "converter/verify.h"
#include "distckpt/formats/safetensors.h"
#include "distckpt/storage/file_io.h"
#include "tests/converter/adapter/peft_files.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace adapter_test {

namespace fs = std::filesystem;
using distckpt::DType;
using peft_files::random_factors;
using peft_files::small_integers;
using peft_files::write_peft;
using support::fails;
using support::TempDir;

constexpr std::string_view kUp = "model.layers.1.mlp.up_proj.weight";
constexpr std::string_view kQuery = "model.layers.0.self_attn.q_proj.weight";

// A tensor of the only weight file of a folder, as fp32.
std::vector<float> values_of(const fs::path& folder, std::string_view name) {
  const auto header = distckpt::read_safetensors_header(folder / "model.safetensors");
  const auto bytes = support::read_bytes(folder / "model.safetensors");
  for (const auto& entry : header.entries) {
    if (entry.name != name) continue;
    EXPECT_EQ(entry.dtype, DType::kF32);
    std::vector<float> values(static_cast<std::size_t>(entry.shape.product()));
    std::memcpy(values.data(), bytes.data() + entry.begin, values.size() * sizeof(float));
    return values;
  }
  ADD_FAILURE() << "no " << name;
  return {};
}

// A model in fp32 of hidden size 16, feed-forward size 24, 4 heads of 4 channels.
class AdapterTest : public testing::Test {
 protected:
  AdapterTest() {
    support::write_tiny_model({.dtype = DType::kF32, .norm_dtype = DType::kF32}, dir_ / "base", 3);
  }

  // Changes the up projection of the second layer and the query of the first, by rank 2.
  void write_adapter(const std::string& more = "") {
    write_peft(dir_ / "adapter",
               {random_factors("model.layers.1.mlp.up_proj", 24, 16, 1),
                random_factors("model.layers.0.self_attn.q_proj", 16, 16, 3)},
               more);
  }
  MergeReport merge(const std::string& adapter,
                    const std::string& to,
                    ConvertOptions options = {}) {
    options.from = dir_ / "base";
    options.to = dir_ / to;
    if (!options.format) options.format = Format::kHuggingFace;
    return merge_adapter(std::move(options), {.path = dir_ / adapter});
  }

  TempDir dir_;
};

TEST_F(AdapterTest, MergedWeightsAreTheSumInFp32) {
  write_adapter();
  const auto report = merge("adapter", "merged");
  EXPECT_EQ(report.num_tensors, 2);
  EXPECT_TRUE(report.converted.proved);
  const auto right = small_integers(32, 1), left = small_integers(48, 2);
  const auto before = values_of(dir_ / "base", kUp), after = values_of(dir_ / "merged", kUp);
  for (std::size_t row = 0; row < 24; ++row) {
    for (std::size_t column = 0; column < 16; ++column) {
      const auto product = left[row * 2] * right[column] + left[row * 2 + 1] * right[16 + column];
      const auto at = row * 16 + column;
      EXPECT_EQ(after[at], before[at] + 2.0F * product) << row << ", " << column;
    }
  }
  EXPECT_EQ(values_of(dir_ / "base", "model.norm.weight"),
            values_of(dir_ / "merged", "model.norm.weight"));
}

TEST_F(AdapterTest, MergingIntoMegatronsFormIsMergingAndConverting) {
  write_adapter();
  merge("adapter", "merged");
  merge("adapter", "megatron",
        {.format = Format::kTorchDist, .parallel = {.tensor_model_parallel_size = 2}});
  EXPECT_TRUE(verify({.left = dir_ / "merged", .right = dir_ / "megatron"}).identical());
}

TEST_F(AdapterTest, ComesBackFromMegatronBridgesFormByteForByte) {
  write_adapter(R"(, "target_modules": ["up_proj", "q_proj"])");
  const auto there = convert_adapter({.from = dir_ / "adapter",
                                      .to = dir_ / "megatron",
                                      .base = dir_ / "base",
                                      .form = AdapterForm::kMegatron,
                                      .parallel = {.tensor_model_parallel_size = 2}});
  EXPECT_TRUE(there.canonical);  // keys and values have no factors
  const auto back = convert_adapter({.from = dir_ / "megatron",
                                     .to = dir_ / "back",
                                     .base = dir_ / "base",
                                     .form = AdapterForm::kPeft});
  EXPECT_EQ(back.source_form, AdapterForm::kMegatron);
  const auto base = open(dir_ / "base");
  const AdapterChanges before(dir_ / "adapter", base, {}), after(dir_ / "back", base, {});
  // Query, key, value, gate and up of both layers: what was not adapted has zeros.
  ASSERT_EQ(before.tensors().size(), 2U);
  ASSERT_EQ(after.tensors().size(), 10U);
  std::size_t num_zeros = 0;
  for (const auto& found : after.tensors()) {
    const auto tensor = std::ranges::find(before.tensors(), found.tensor, &AdaptedTensor::tensor);
    if (tensor == before.tensors().end()) {
      const auto factors = after.load(found);
      EXPECT_EQ(std::ranges::count(factors.left, 0.0F), std::ssize(factors.left)) << found.tensor;
      EXPECT_EQ(std::ranges::count(factors.right, 0.0F), std::ssize(factors.right));
      ++num_zeros;
      continue;
    }
    EXPECT_EQ(found.scaling, tensor->scaling) << found.tensor;
    EXPECT_EQ(after.load(found).left, before.load(*tensor).left) << found.tensor;
    EXPECT_EQ(after.load(found).right, before.load(*tensor).right) << found.tensor;
  }
  EXPECT_EQ(num_zeros, 8U);
}

TEST_F(AdapterTest, OfMegatronBridgeIsNamedByInspect) {
  write_adapter();
  convert_adapter({.from = dir_ / "adapter",
                   .to = dir_ / "megatron",
                   .base = dir_ / "base",
                   .form = AdapterForm::kMegatron});
  const auto report = inspect(dir_ / "megatron", std::nullopt, {});
  EXPECT_GT(report.num_adapter_tensors, 0);
  EXPECT_EQ(report.num_adapter_tensors, std::ssize(report.tensors));
}

TEST_F(AdapterTest, IsMergedAlikeWithZerosUpToOneRank) {
  auto deeper = random_factors("model.layers.0.self_attn.o_proj", 16, 16, 5);
  deeper.rank = 4;
  deeper.right = small_integers(64, 5);
  deeper.left = small_integers(64, 6);
  write_peft(dir_ / "adapter", {random_factors("model.layers.1.mlp.up_proj", 24, 16, 1), deeper},
             R"(, "rank_pattern": {"o_proj": 4}, "alpha_pattern": {"o_proj": 8})");
  merge("adapter", "merged");
  for (const auto form : {AdapterForm::kMegatron, AdapterForm::kVllm}) {
    const auto name = form == AdapterForm::kVllm ? "vllm" : "megatron";
    convert_adapter(
        {.from = dir_ / "adapter", .to = dir_ / name, .base = dir_ / "base", .form = form});
    merge(name, fmt::format("merged_{}", name));
    EXPECT_TRUE(verify({.left = dir_ / "merged", .right = dir_ / fmt::format("merged_{}", name)})
                    .identical());
  }
}

TEST_F(AdapterTest, VerlsFormIsPeftsInAFolder) {
  write_adapter();
  convert_adapter({.from = dir_ / "adapter",
                   .to = dir_ / "verl",
                   .base = dir_ / "base",
                   .form = AdapterForm::kVerl});
  const auto weights = support::read_bytes(dir_ / "verl" / kVerlAdapter / kAdapterWeights);
  EXPECT_FALSE(weights.empty());
  merge("adapter", "merged");
  merge("verl/lora_adapter", "merged_verl");
  EXPECT_TRUE(support::same_bytes(support::read_bytes(dir_ / "merged/model.safetensors"),
                                  support::read_bytes(dir_ / "merged_verl/model.safetensors")));
}

TEST_F(AdapterTest, ASplitUpdateOfTheRankComesBack) {
  write_adapter();
  merge("adapter", "tuned");
  const auto report = split_adapter(
      {.base = dir_ / "base", .tuned = dir_ / "tuned", .to = dir_ / "split", .rank = 2});
  ASSERT_EQ(report.tensors.size(), 2U);
  double squares = 0;
  const auto before = values_of(dir_ / "base", kQuery), after = values_of(dir_ / "tuned", kQuery);
  for (std::size_t i = 0; i < before.size(); ++i) {
    const auto difference = static_cast<double>(after[i]) - before[i];
    squares += difference * difference;
  }
  for (const auto& tensor : report.tensors) {
    EXPECT_LT(tensor.error, 1e-5 * tensor.change) << tensor.name;
    if (tensor.name != kQuery) continue;
    EXPECT_NEAR(tensor.change, std::sqrt(squares), 1e-7 * std::sqrt(squares));  // of fp32
  }
  merge("split", "again");
  const auto again = values_of(dir_ / "again", kQuery);
  for (std::size_t i = 0; i < again.size(); ++i) EXPECT_NEAR(again[i], after[i], 1e-4) << i;
}

TEST_F(AdapterTest, NothingToSplitIsAnError) {
  fs::copy(dir_ / "base", dir_ / "same");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"do not differ"}, [&] {
    split_adapter({.base = dir_ / "base", .tuned = dir_ / "same", .to = dir_ / "out", .rank = 2});
  }));
  EXPECT_FALSE(fs::exists(dir_ / "out"));
}

TEST_F(AdapterTest, RefusesABaseWhoseModelTypeIsNotKnown) {
  write_adapter();
  auto config = distckpt::read_text(dir_ / "base/config.json");
  config.replace(config.find("\"llama\""), 7, "\"llamb\"");
  distckpt::write_text(dir_ / "base/config.json", config);
  fs::copy(dir_ / "base", dir_ / "tuned");
  auto bytes = distckpt::read_text(dir_ / "tuned/model.safetensors");
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  distckpt::write_text(dir_ / "tuned/model.safetensors", bytes);
  const std::vector<std::string_view> said{"the model_type \"llamb\" is not known", "config.json"};
  EXPECT_TRUE(fails(ErrorKind::kLayout, said, [&] { merge("adapter", "out"); }));
  EXPECT_TRUE(fails(ErrorKind::kLayout, said, [&] {
    convert_adapter({.from = dir_ / "adapter", .to = dir_ / "out", .base = dir_ / "base"});
  }));
  EXPECT_TRUE(fails(ErrorKind::kLayout, said, [&] {
    split_adapter({.base = dir_ / "base", .tuned = dir_ / "tuned", .to = dir_ / "out", .rank = 2});
  }));
  EXPECT_FALSE(fs::exists(dir_ / "out"));
}

TEST_F(AdapterTest, RefusesFactorsThatDoNotFitTheBase) {
  write_peft(dir_ / "adapter", {random_factors("model.layers.0.self_attn.q_proj", 16, 12, 1)});
  EXPECT_TRUE(fails(ErrorKind::kLayout, {kQuery}, [&] { merge("adapter", "merged"); }));
  write_peft(dir_ / "adapter", {random_factors("model.layers.9.self_attn.q_proj", 16, 16, 1)});
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"model.layers.9.self_attn.q_proj"},
                    [&] { merge("adapter", "merged"); }));
  EXPECT_FALSE(fs::exists(dir_ / "merged"));
}

TEST_F(AdapterTest, RefusesAFactorWithoutItsOther) {
  write_adapter();
  auto bytes = distckpt::read_text(dir_ / "adapter" / kAdapterWeights);
  const auto at = bytes.find("q_proj.lora_B");
  bytes.replace(at, 6, "k_proj");
  distckpt::write_text(dir_ / "adapter" / kAdapterWeights, bytes);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"k_proj", "one of two factors is missing"},
                    [&] { merge("adapter", "merged"); }));
}

}  // namespace adapter_test
}  // namespace ferry::converter
