// Quantisation in config.json, and the tensors that stand for one weight.
#include "converter/families/quantization.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "distckpt/base/error.h"
#include "tests/support/expect.h"

namespace ferry::converter {
namespace quantization_test {

using Method = Quantization::Method;
using nlohmann::json;
using support::fails;

std::optional<Quantization> parsed(const json& how) {
  return parse_quantization(json{{"quantization_config", how}}.dump(), "config.json");
}

json groups(int bits, const std::string& type, int size) {
  return {{"group_0", {{"weights", {{"num_bits", bits}, {"type", type}, {"group_size", size}}}}}};
}

TEST(ParseQuantization, FindsNothingWhereNothingIsQuantised) {
  EXPECT_FALSE(parse_quantization(R"({"model_type": "llama"})", "config.json").has_value());
  EXPECT_FALSE(parse_quantization(R"({"quantization_config": null})", "config.json").has_value());
  EXPECT_FALSE(parse_quantization("[]", "config.json").has_value());
}

TEST(ParseQuantization, LooksIntoTheLanguageModelsPart) {
  const json config{{"text_config", {{"quantization_config", {{"quant_method", "mxfp4"}}}}}};
  EXPECT_EQ(parse_quantization(config.dump(), "config.json")->method, Method::kMxfp4);
}

TEST(ParseQuantization, ReadsBlocksOfFp8OrOneForAll) {
  const auto blocks = parsed({{"quant_method", "fp8"}, {"weight_block_size", {128, 64}}});
  EXPECT_EQ(blocks->method, Method::kFp8);
  EXPECT_EQ(blocks->block, (distckpt::Dims{128, 64}));
  EXPECT_TRUE(parsed({{"quant_method", "fp8"}, {"fmt", "float8_e4m3fn"}})->block.empty());
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"fp8 (e5m2)"}, [] {
    parsed({{"quant_method", "fp8"}, {"fmt", "e5m2"}});
  }));
  for (const auto& size : {json{128}, json{0, 128}, json{-1, 1}, json{1, "x"}, json(128)}) {
    EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"weight_block_size"}, [&] {
      parsed({{"quant_method", "fp8"}, {"weight_block_size", size}});
    })) << size;
  }
}

TEST(ParseQuantization, ReadsFp8WithScalesOfRowsBlocksAndTensors) {
  const auto floats = [](const json& more) {
    json weights{{"num_bits", 8}, {"type", "float"}};
    weights.update(more);
    return *parsed({{"quant_method", "compressed-tensors"},
                    {"format", "float-quantized"},
                    {"config_groups", {{"group_0", {{"weights", weights}}}}}});
  };
  EXPECT_EQ(floats({{"strategy", "channel"}}).block, (distckpt::Dims{1, 0}));
  EXPECT_TRUE(floats({{"strategy", "tensor"}}).block.empty());
  const auto blocks = floats({{"strategy", "block"}, {"block_structure", {128, 64}}});
  EXPECT_EQ(blocks.block, (distckpt::Dims{128, 64}));
  EXPECT_EQ(blocks.method, Method::kFp8);
  EXPECT_EQ(blocks.scale_suffix, "_scale");
  EXPECT_EQ(parsed({{"quant_method", "modelopt"}, {"quant_algo", "FP8"}})->scale_suffix, "_scale");
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"strategy", "group"}, [&] {
    floats({{"strategy", "group"}});
  }));
}

TEST(ParseQuantization, KnowsTheFormatsOfFourBits) {
  const auto int4 = parsed({{"quant_method", "compressed-tensors"},
                            {"format", "pack-quantized"},
                            {"config_groups", groups(4, "int", 32)}});
  EXPECT_EQ(int4->method, Method::kPacked);
  EXPECT_EQ(int4->block, (distckpt::Dims{1, 32}));
  EXPECT_EQ(int4->packed->encoding, distckpt::Encoding::kInt4);
  const auto nvfp4 = parsed({{"quant_method", "compressed-tensors"},
                             {"format", "nvfp4-pack-quantized"},
                             {"config_groups", groups(4, "float", 16)}});
  EXPECT_EQ(nvfp4->packed->how, distckpt::GlobalScale::kDivisor);
  auto strategy = groups(4, "float", 16);
  strategy["group_0"]["weights"]["strategy"] = "tensor_group";
  EXPECT_EQ(parsed({{"quant_method", "compressed-tensors"},
                    {"format", "nvfp4-pack-quantized"},
                    {"config_groups", strategy}})
                ->block,
            nvfp4->block);
  const auto modelopt = parsed({{"quant_method", "modelopt"}, {"quant_algo", "NVFP4"}});
  EXPECT_EQ(modelopt->packed->how, distckpt::GlobalScale::kFactor);
  EXPECT_EQ(modelopt->block, (distckpt::Dims{1, 16}));
}

TEST(ParseQuantization, ReadsFormatsThatDifferByNameAlone) {
  const json weights{
      {"num_bits", 8}, {"type", "float"}, {"strategy", "block"}, {"block_structure", "128x64"}};
  const json how{{"quant_method", "compressed-tensors"},
                 {"format", "naive-quantized"},
                 {"config_groups", {{"group_0", {{"weights", weights}}}}}};
  EXPECT_EQ(parsed(how)->block, (distckpt::Dims{128, 64}));
  const json older{{"compression_config", how}};
  EXPECT_EQ(parse_quantization(older.dump(), "config.json"), parsed(how));
  const auto plain = without_quantization(older.dump(), distckpt::DType::kBF16, "config.json");
  EXPECT_FALSE(json::parse(plain).contains("compression_config"));
  EXPECT_EQ(parsed({{"quant_method", "modelopt"}, {"quant_algo", "W4A16_NVFP4"}}),
            parsed({{"quant_method", "modelopt"}, {"quant_algo", "NVFP4"}}));
}

TEST(ParseQuantization, MindsAnOrderOfColumnsThatStaysInTheFileAlone) {
  const auto ordered = [](const json& order) {
    auto config_groups = groups(4, "int", 32);
    config_groups["group_0"]["weights"]["actorder"] = order;
    return parsed({{"quant_method", "compressed-tensors"},
                   {"format", "pack-quantized"},
                   {"config_groups", config_groups}});
  };
  EXPECT_EQ(ordered("static"), ordered(nullptr));
  EXPECT_EQ(ordered("weight"), ordered(nullptr));
  for (const auto& order : {json("group"), json("dynamic"), json(true)}) {
    EXPECT_TRUE(fails(ErrorKind::kLayout, {"actorder is none of"}, [&] { ordered(order); }))
        << order;
  }
}

TEST(ParseQuantization, ReadsFp8BesideFourBitsOfModelOpt) {
  const auto mixed = [](const json& layers) {
    return parsed({{"quant_method", "modelopt"},
                   {"quant_algo", "MIXED_PRECISION"},
                   {"quantized_layers", layers}});
  };
  const auto both = mixed({{"a", {{"quant_algo", "FP8"}}}, {"b", {{"quant_algo", "NVFP4"}}}});
  EXPECT_TRUE(both->fp8_beside);
  EXPECT_EQ(both->method, Method::kPacked);
  EXPECT_EQ(both->block, (distckpt::Dims{1, 16}));
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"quantized_layers.a", "FP8_PB_WO"}, [&] {
    mixed({{"a", {{"quant_algo", "FP8_PB_WO"}}}});
  }));
}

TEST(ParseQuantization, RefusesOtherBitsGroupsAndMethodsByName) {
  const auto refuses = [](ErrorKind kind, std::string_view words, const json& how) {
    EXPECT_TRUE(fails(kind, {"config.json: quantization_config", words}, [&] { parsed(how); }));
  };
  const auto with = [](const json& config_groups) {
    return json{{"quant_method", "compressed-tensors"},
                {"format", "pack-quantized"},
                {"config_groups", config_groups}};
  };
  refuses(ErrorKind::kLayout, "int of 8 bits", with(groups(8, "int", 32)));
  refuses(ErrorKind::kLayout, "float of 4 bits", with(groups(4, "float", 32)));
  refuses(ErrorKind::kCorrupt, "config_groups is empty", with(json::object()));
  auto two = groups(4, "int", 32);
  two["group_1"] = groups(4, "int", 64)["group_0"];
  refuses(ErrorKind::kLayout, "group sizes 32 and 64", with(two));
  auto asymmetric = groups(4, "int", 32);
  asymmetric["group_0"]["weights"]["symmetric"] = false;
  refuses(ErrorKind::kLayout, "only symmetric", with(asymmetric));
  auto channel = groups(4, "int", 32);
  channel["group_0"]["weights"]["strategy"] = "channel";
  channel["group_0"]["weights"]["group_size"] = nullptr;
  refuses(ErrorKind::kLayout, "strategy \"channel\" is not read", with(channel));
  refuses(ErrorKind::kLayout, "quantised by \"awq\" (no format)", {{"quant_method", "awq"}});
  refuses(ErrorKind::kLayout, "(marlin)",
          {{"quant_method", "compressed-tensors"}, {"format", "marlin"}});
}

TEST(QuantizedWeight, IsThatWhoseElementsOrScalesATensorHolds) {
  for (const auto* part :
       {"weight_scale_inv", "weight_packed", "weight_scale", "weight_shape", "weight_global_scale",
        "input_global_scale", "weight_scale_2", "q_scale", "k_scale", "activation_scale"})
    EXPECT_EQ(quantized_weight(std::string("a.q_proj.") + part), "a.q_proj.weight") << part;
  EXPECT_EQ(quantized_weight("mlp.experts.down_proj_blocks"), "mlp.experts.down_proj");
  EXPECT_EQ(quantized_weight("mlp.experts.down_proj_scales"), "mlp.experts.down_proj");
  EXPECT_EQ(quantized_weight("a.q_proj.bias"), "a.q_proj.bias");
}

TEST(NumParameters, CountsWeightsAndNotTheirScales) {
  using distckpt::DType;
  const auto count = [](const char* name, DType dtype, const distckpt::Shape& shape) {
    return num_parameters({.name = name, .dtype = dtype, .shape = shape});
  };
  EXPECT_EQ(count("a.weight", DType::kF8E4M3, {128, 256}), 128 * 256);
  EXPECT_EQ(count("a.weight_scale_inv", DType::kF32, {1, 2}), 0);
  EXPECT_EQ(count("a.input_scale", DType::kF32, {1}), 0);
  EXPECT_EQ(count("experts.down_proj_blocks", DType::kU8, {2, 8, 4, 16}), 2 * 8 * 128);
  EXPECT_EQ(count("experts.down_proj_scales", DType::kU8, {2, 8, 4}), 0);
  EXPECT_EQ(count("a.weight_packed", DType::kI32, {8, 4}), 8 * 32);
  EXPECT_EQ(count("a.weight", DType::kU8, {8, 4}), 8 * 8);
  EXPECT_EQ(count("a.bias", DType::kBF16, {8}), 8);
}

TEST(WithoutQuantization, TakesItOutOfBothPlacesAndKeepsTheRest) {
  const auto text = without_quantization(
      R"({"b": 1, "quantization_config": {}, "a": 2, "text_config": {"quantization_config": 3}})",
      distckpt::DType::kBF16, "config.json");
  const auto object = json::parse(text);
  EXPECT_FALSE(object.contains("quantization_config"));
  EXPECT_TRUE(object["text_config"].find("quantization_config") == object["text_config"].end());
  EXPECT_LT(text.find("\"b\""), text.find("\"a\"")) << "the order of the keys stays";
}

TEST(WithQuantization, IsReadBackAsItWasWritten) {
  for (const auto method : {Method::kFp8, Method::kFp8Lossless, Method::kMxfp4}) {
    const auto text = with_quantization(R"({"model_type": "llama"})", method, {"lm_head"}, "x");
    const auto how = json::parse(text)["quantization_config"];
    EXPECT_EQ(how["modules_to_not_convert"], json{"lm_head"});
    EXPECT_EQ(how.value("scale_fmt", ""), method == Method::kFp8Lossless ? "ue8m0" : "");
    const auto read = parse_quantization(text, "x");
    EXPECT_EQ(read->method, method == Method::kMxfp4 ? Method::kMxfp4 : Method::kFp8);
    if (method == Method::kMxfp4) continue;
    EXPECT_EQ(read->block, (distckpt::Dims{128, 128}));
  }
}

TEST(QuantizationMethod, HasTheNamesOfTheOption) {
  EXPECT_EQ(quantization_method("fp8-block"), Method::kFp8);
  EXPECT_EQ(quantization_method("fp8-block-lossless"), Method::kFp8Lossless);
  EXPECT_EQ(quantization_method("mxfp4"), Method::kMxfp4);
  EXPECT_FALSE(quantization_method("fp8").has_value());
}

}  // namespace quantization_test
}  // namespace ferry::converter
