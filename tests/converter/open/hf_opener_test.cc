// Hugging Face folders that are not what their config.json says; folders of quantised weights,
// which Ferry wrote, with parts renamed.
#include "converter/open/hf_opener.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>

#include "converter/convert.h"
#include "converter/open/checkpoint.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace hf_opener_test {

namespace fs = std::filesystem;
using support::fails;
using support::TempDir;
using support::test_data;

// A copy of a folder of tests/data in which texts of a file are replaced.
class Folder {
 public:
  explicit Folder(const char* model = "hf_llama") { fs::copy(test_data(model) / "hf", path()); }
  // The same in blocks.
  Folder(const char* model, Quantization::Method method) {
    convert({.from = test_data(model) / "hf",
             .to = path(),
             .format = Format::kHuggingFace,
             .quantize = method,
             .threads = 1});
  }

  fs::path path() const { return dir_ / "hf"; }

  // In the header of the weights, whose length stays.
  Folder& rename(std::string_view from, std::string_view to) {
    EXPECT_EQ(from.size(), to.size());
    return replace("model.safetensors", from, to);
  }
  Folder& configure(std::string_view from, std::string_view to) {
    return replace("config.json", from, to);
  }

 private:
  Folder& replace(const char* file, std::string_view from, std::string_view to) {
    auto text = distckpt::read_text(path() / file);
    const auto at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    if (at != std::string::npos) text.replace(at, from.size(), to);
    distckpt::write_text(path() / file, text);
    return *this;
  }

  TempDir dir_;
};

TEST(HfOpener, NamesATensorThatNoRuleMaps) {
  Folder folder;
  folder.rename("model.norm.weight", "model.norn.weight");
  EXPECT_TRUE(fails(ErrorKind::kLayout,
                    {"model.norn.weight: no rule of the family llama maps it (model.safetensors)"},
                    [&] { open(folder.path()); }));
}

TEST(HfOpener, NamesTheShapeThatConfigJsonSays) {
  Folder folder;
  folder.configure("\"intermediate_size\": 48", "\"intermediate_size\": 47");
  EXPECT_TRUE(fails(ErrorKind::kLayout,
                    {"mlp.", "expected", "47", "as config.json says (model.safetensors)"},
                    [&] { open(folder.path()); }));
}

TEST(HfOpener, CountsTensorsThatAreMissing) {
  Folder folder;
  folder.configure("\"num_hidden_layers\": 4", "\"num_hidden_layers\": 5");
  EXPECT_TRUE(fails(
      ErrorKind::kLayout,
      {"model.layers.4.", "is missing, and 8 other tensors", "the download may be incomplete"},
      [&] { open(folder.path()); }));
}

TEST(HfOpener, OpensTheTensorsThatAreThereWhereAskedTo) {
  Folder folder;
  folder.configure("\"num_hidden_layers\": 4", "\"num_hidden_layers\": 5");
  const auto checkpoint = open(folder.path(), {.incomplete = true});
  EXPECT_EQ(checkpoint.tensors.size(), 39U);
  EXPECT_EQ(checkpoint.map.config.num_layers, 5);
}

TEST(HfOpener, DropsPredictionLayersThatNoTensorIsOf) {
  Folder folder("hf_glm4_moe");
  const auto whole = open(folder.path());
  EXPECT_EQ(whole.map.config.mtp_num_layers, 1);
  EXPECT_TRUE(std::ranges::any_of(whole.tensors, [](const auto& tensor) {
    return tensor.name == "model.layers.3.eh_proj.weight";
  }));
  const auto without = open(folder.path(), {.mtp = PredictionLayers::kDrop});
  EXPECT_EQ(without.map.config.mtp_num_layers, 0);
  EXPECT_TRUE(std::ranges::none_of(without.tensors, [](const auto& tensor) {
    return tensor.name.starts_with("model.layers.3.");
  }));
}

TEST(HfOpener, RefusesToDropPredictionLayersThatAreNotThere) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"prediction layers"},
                    [] { open(test_data("hf_llama") / "hf", {.mtp = PredictionLayers::kDrop}); }));
}

constexpr auto kFp8 = Quantization::Method::kFp8;
constexpr auto kMxfp4 = Quantization::Method::kMxfp4;

TEST(HfOpener, LinksAnFp8WeightToItsScales) {
  const Folder folder("hf_llama", kFp8);
  const auto checkpoint = open(folder.path());
  EXPECT_EQ(checkpoint.tensors.size(), 39U);
  EXPECT_EQ(checkpoint.links.scales.size(), 28U);  // seven weights of each of four layers
  for (const auto& tensor : checkpoint.tensors)
    EXPECT_EQ(tensor.dtype, distckpt::DType::kBF16) << tensor.name;
}

TEST(HfOpener, KeepsFp8WeightsAndScalesAsTheyAreWhereAskedTo) {
  const Folder folder("hf_llama", kFp8);
  const auto checkpoint = open(folder.path(), {.keep_quantized = true});
  EXPECT_EQ(checkpoint.tensors.size(), 39U + 28U);
  EXPECT_TRUE(checkpoint.links.scales.empty());
}

TEST(HfOpener, NamesScalesThatAnFp8WeightLacks) {
  Folder folder("hf_llama", kFp8);
  folder.rename("layers.1.mlp.up_proj.weight_scale_inv", "layers.1.mlp.up_proj.activation_scale");
  EXPECT_TRUE(fails(ErrorKind::kLayout,
                    {"model.layers.1.mlp.up_proj.weight: is in FP8, but "
                     "model.layers.1.mlp.up_proj.weight_scale_inv is missing"},
                    [&] { open(folder.path()); }));
}

TEST(HfOpener, NamesScalesWithoutAQuantizationConfig) {
  Folder folder("hf_llama", kFp8);
  folder.configure("\"quantization_config\"", "\"quantization_confit\"");
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"weight"}, [&] { open(folder.path()); }));
}

TEST(HfOpener, NamesScalesThatBlocksLack) {
  Folder folder("hf_gpt_oss", kMxfp4);
  folder.rename("layers.1.mlp.experts.gate_up_proj_scales",
                "layers.1.mlp.experts.gate_up_proj_scalez");
  EXPECT_TRUE(fails(ErrorKind::kLayout,
                    {"model.layers.1.mlp.experts.gate_up_proj_blocks: are blocks, but "
                     "model.layers.1.mlp.experts.gate_up_proj_scales is missing"},
                    [&] { open(folder.path()); }));
}

TEST(HfOpener, NamesBlocksThatScalesLack) {
  Folder folder("hf_gpt_oss", kMxfp4);
  folder.rename("layers.1.mlp.experts.down_proj_blocks", "layers.1.mlp.experts.down_proj_blockz");
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"model.layers.1.mlp.experts.down_proj_block"},
                    [&] { open(folder.path()); }));
}

TEST(HfOpener, TakesWeightsApartFromTheTowerThatIsCarried) {
  const auto checkpoint = open(test_data("hf_qwen3_vl") / "hf");
  const auto carried = std::ranges::count_if(checkpoint.tensors, [&](const auto& tensor) {
    return checkpoint.map.is_carried(tensor.name);
  });
  EXPECT_GT(carried, 0);
  EXPECT_EQ(checkpoint.map.tensors.size() + static_cast<std::size_t>(carried),
            checkpoint.tensors.size());
}

}  // namespace hf_opener_test
}  // namespace ferry::converter
