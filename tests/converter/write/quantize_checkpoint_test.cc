#include "converter/write/quantize_checkpoint.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "converter/convert.h"
#include "converter/verify.h"
#include "distckpt/base/json.h"
#include "distckpt/formats/safetensors.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace quantize_checkpoint_test {

using distckpt::DType;
using Method = Quantization::Method;

class QuantizeCheckpoint : public testing::Test {
 protected:
  void SetUp() override { support::write_tiny_model({}, dir_ / "hf", 1); }
  void write(Method method) const {
    convert({.from = dir_ / "hf",
             .to = dir_ / "out",
             .format = Format::kHuggingFace,
             .quantize = method});
  }
  std::map<std::string, DType> dtypes() const {
    std::map<std::string, DType> found;
    for (const auto& entry :
         distckpt::read_safetensors_header(dir_ / "out" / "model.safetensors").entries)
      found.emplace(entry.name, entry.dtype);
    return found;
  }

  support::TempDir dir_;
};

TEST_F(QuantizeCheckpoint, GivesLinearLayersBlocksAndScales) {
  write(Method::kFp8);
  const auto found = dtypes();
  for (const auto* name :
       {"self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"}) {
    const auto weight = std::string("model.layers.1.") + name + ".weight";
    EXPECT_EQ(found.at(weight), DType::kF8E4M3) << weight;
    EXPECT_EQ(found.at(weight + "_scale_inv"), DType::kF32) << weight;
  }
}

TEST_F(QuantizeCheckpoint, LeavesNormsEmbeddingAndOutputLayerAsTheyAre) {
  write(Method::kFp8);
  const auto found = dtypes();
  for (const auto* name : {"model.layers.0.input_layernorm.weight", "model.embed_tokens.weight",
                           "model.norm.weight", "lm_head.weight"}) {
    EXPECT_EQ(found.at(name), DType::kBF16) << name;
    EXPECT_FALSE(found.contains(std::string(name) + "_scale_inv")) << name;
  }
}

TEST_F(QuantizeCheckpoint, SaysInTheConfigurationWhatStayed) {
  write(Method::kFp8);
  const auto file = dir_ / "out" / "config.json";
  const auto config =
      distckpt::parse_json(distckpt::read_text(file), file.string()).at("quantization_config");
  EXPECT_EQ(config.at("quant_method"), "fp8");
  EXPECT_EQ(config.at("weight_block_size").dump(), "[128,128]");
  const auto stayed = config.at("modules_to_not_convert").get<std::vector<std::string>>();
  for (const auto* name : {"model.embed_tokens", "lm_head"})
    EXPECT_NE(std::ranges::find(stayed, name), stayed.end()) << name;
}

TEST_F(QuantizeCheckpoint, ReadsBackWithLinearLayersAloneChanged) {
  write(Method::kFp8);
  const auto report = verify({.left = dir_ / "hf", .right = dir_ / "out"}, /*weights_only=*/true);
  EXPECT_TRUE(report.unpaired.empty());
  EXPECT_EQ(report.tensors.size(), 14U);  // seven of each of two layers
  for (const auto& tensor : report.tensors)
    EXPECT_TRUE(tensor.tensor.ends_with("_proj.weight")) << tensor.tensor;
}

TEST_F(QuantizeCheckpoint, HasMxfp4ForExpertsOfGptOssAlone) {
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"--quantize mxfp4", "GPT-OSS", "llama has none"},
                             [&] { write(Method::kMxfp4); }));
  // Its experts lie in one tensor, transposed, as GPT-OSS's do.
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"--quantize mxfp4", "qwen3_vl_moe has none"}, [&] {
    convert({.from = support::test_data("hf_qwen3_vl_moe") / "hf",
             .to = dir_ / "out",
             .format = Format::kHuggingFace,
             .quantize = Method::kMxfp4});
  }));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "out"));
}

TEST_F(QuantizeCheckpoint, HasALosslessFormForFourBitsAlone) {
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"fp8-block-lossless", "no weights of four bits"},
                             [&] { write(Method::kFp8Lossless); }));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "out"));
}

}  // namespace quantize_checkpoint_test
}  // namespace ferry::converter
