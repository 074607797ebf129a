// The products that a certificate examines are those of the table: every matrix of every family.
#include "models/spec/products.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "converter/families/hf_config.h"
#include "distckpt/storage/file_io.h"
#include "models/spec/parameters.h"
#include "tests/support/files.h"

namespace ferry::models {
namespace products_test {

// Matrices, and tensors of more dimensions, that no input is multiplied with.
constexpr std::array<std::string_view, 10> kNoProducts{
    "embedding.word_embeddings.weight",  // looked up by token
    "per_layer_embedding.weight",
    "pos_embed.weight",         // looked up by place
    "patch_embed.proj.weight",  // a convolution over patches
    "self_attention.conv1d.weight.query",
    "self_attention.conv1d.weight.key",
    "self_attention.conv1d.weight.value",
    "mixer.conv1d.weight.x",
    "mixer.conv1d.weight.B",
    "mixer.conv1d.weight.C",
};

// The configuration of each model of tests/data, by the name of its folder.
std::map<std::string, TransformerConfig> models_of_all_families() {
  std::map<std::string, TransformerConfig> found;
  for (const auto& entry : std::filesystem::directory_iterator(support::test_data(""))) {
    const auto name = entry.path().filename().string();
    const auto path = entry.path() / "hf/config.json";
    if (!name.starts_with("hf_") || !std::filesystem::exists(path)) continue;
    found.emplace(name, converter::parse_hf_config(distckpt::read_text(path), path.string()));
  }
  return found;
}

std::vector<WholeParameter> all_parameters(const TransformerConfig& config) {
  auto sections = vision_sections(config);
  const auto add = [&](const std::vector<Section>& more) {
    sections.insert(sections.end(), more.begin(), more.end());
  };
  add({{.stage = Stage::kFirst, .table = &kEmbeddingSection}});
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer)
    add(layer_sections(config, layer));
  for (std::int64_t i = 0; i < config.mtp_num_layers; ++i) add(prediction_sections(config, i));
  add({{.stage = Stage::kLast, .table = &kHeadSection}});
  std::vector<WholeParameter> parameters;
  for (const auto& section : sections) {
    for (auto& parameter : parameters_of(section, config, {0, config.num_moe_experts}))
      parameters.push_back(std::move(parameter));
  }
  return parameters;
}

bool is_multiplied(const WholeParameter& parameter, const TransformerConfig& config) {
  if (parameter.key == kEmbeddingKey) return config.is_tied();
  return parameter.shape.rank() >= 2 &&
         std::ranges::find(kNoProducts, parameter.row->name) == kNoProducts.end();
}

const GemmShape* product_of(const WholeParameter& parameter, const std::vector<GemmShape>& shapes) {
  const auto found = std::ranges::find_if(shapes, [&](const GemmShape& shape) {
    return shape.row == parameter.row && shape.n == parameter.shape[0] &&
           shape.k == parameter.shape[1];
  });
  return found == shapes.end() ? nullptr : &*found;
}

// The matrices that no product is of.
std::set<std::string> missed(const TransformerConfig& config,
                             const std::vector<GemmShape>& shapes) {
  std::set<std::string> keys;
  for (const auto& parameter : all_parameters(config))
    if (is_multiplied(parameter, config) && product_of(parameter, shapes) == nullptr)
      keys.insert(parameter.key);
  return keys;
}

std::string names(const std::vector<GemmShape>& shapes) {
  std::string text;
  for (const auto& shape : shapes) text += shape.name + " ";
  return text;
}

TEST(Products, AreOfEveryMatrixOfEveryFamilyThatIsMultiplied) {
  const auto models = models_of_all_families();
  ASSERT_GE(models.size(), 37U);
  std::set<std::string_view> others;
  for (const auto& [name, config] : models) {
    const auto shapes = gemm_shapes(config);
    EXPECT_EQ(missed(config, shapes), std::set<std::string>()) << name;
    for (const auto& parameter : all_parameters(config)) {
      if (parameter.shape.rank() < 2 || is_multiplied(parameter, config)) continue;
      EXPECT_EQ(product_of(parameter, shapes), nullptr) << name << " " << parameter.key;
      others.insert(parameter.row->name);
    }
  }
  EXPECT_EQ(others, std::set<std::string_view>(kNoProducts.begin(), kNoProducts.end()));
}

TEST(Products, AreMissedOneByOne) {
  for (const auto& [name, config] : models_of_all_families()) {
    const auto shapes = gemm_shapes(config);
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      auto others = shapes;
      others.erase(others.begin() + static_cast<std::ptrdiff_t>(i));
      EXPECT_FALSE(missed(config, others).empty()) << name << " " << shapes[i].subject();
    }
  }
}

TEST(Products, AreCutAsRanksHoldTheirWeights) {
  constexpr int kRanks = 2;
  const ParallelConfig parallel{.tensor_model_parallel_size = kRanks,
                                .make_vocab_size_divisible_by = 1};
  const MeshShape mesh(parallel, kRanks);
  const LayoutOptions options{.alignment = Alignment::kBitwise};
  std::size_t compared = 0;
  for (const auto* name : {"hf_llama", "hf_qwen2_tied", "hf_qwen3_moe", "hf_gpt_oss",
                           "hf_deepseek_v3", "hf_qwen3_next", "hf_qwen3_vl"}) {
    const auto config = models_of_all_families().at(name);
    const auto shapes = gemm_shapes(config);
    for (const auto& parameter : all_parameters(config)) {
      if (!is_multiplied(parameter, config)) continue;
      const auto* const shape = product_of(parameter, shapes);
      ASSERT_NE(shape, nullptr) << name << " " << parameter.key;
      EXPECT_EQ(shape->grouped, parameter.expert.has_value()) << name << " " << parameter.key;
      for (int rank = 0; rank < kRanks; ++rank) {
        const auto held = shard(parameter, config, mesh, mesh.coordinates(rank), options);
        ASSERT_TRUE(held.has_value());
        const auto boxes = shape->cut ? shape->cut->boxes(held->global_shape, rank, kRanks)
                                      : std::vector{distckpt::Box::whole(held->global_shape)};
        EXPECT_EQ(boxes, held->boxes) << name << " " << parameter.key;
        ++compared;
      }
    }
  }
  EXPECT_GT(compared, 200U);
}

TEST(Products, OfLatentAttentionExpertsAndAPredictionLayerHaveMegatronsNames) {
  EXPECT_EQ(names(gemm_shapes(models_of_all_families().at("hf_deepseek_v3"))),
            "linear_q_down_proj linear_q_up_proj linear_kv_down_proj linear_kv_up_proj "
            "linear_proj linear_fc1 linear_fc2 router experts.linear_fc1 experts.linear_fc2 "
            "shared_experts.linear_fc1 shared_experts.linear_fc2 eh_proj output_layer ");
}

// The values of latent attention, and one dense feed-forward before layers with a shared expert.
TEST(Products, ByRowsHaveTheirInputsGatheredLayerByLayer) {
  const auto config = models_of_all_families().at("hf_deepseek_v3");
  ASSERT_TRUE(config.multi_latent_attention);
  const auto values = config.num_attention_heads * config.v_head_dim;
  std::set<bool> kinds;
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
    const bool moe = config.is_moe_layer(layer);
    const auto ffn = moe ? config.moe_shared_expert_intermediate_size : config.ffn_hidden_size;
    EXPECT_EQ(gathered_channels(config, layer), values + ffn) << layer;
    kinds.insert(moe);
  }
  EXPECT_EQ(kinds.size(), 2U);
  const auto dense = models_of_all_families().at("hf_llama");
  EXPECT_EQ(gathered_channels(dense, 0),
            dense.num_attention_heads * dense.kv_channels + dense.ffn_hidden_size);
  const auto hybrid = models_of_all_families().at("hf_qwen3_next");
  ASSERT_TRUE(hybrid.is_linear_attention_layer(0));
  EXPECT_EQ(gathered_channels(hybrid, 0),
            hybrid.linear_num_value_heads * hybrid.linear_value_head_dim +
                hybrid.moe_shared_expert_intermediate_size);
}

TEST(Products, OfADeltaNetAreThoseOfItsParts) {
  const auto text = names(gemm_shapes(models_of_all_families().at("hf_qwen3_next")));
  EXPECT_NE(text.find("in_proj.query in_proj.key in_proj.value in_proj.z in_proj.beta "
                      "in_proj.alpha out_proj "),
            std::string::npos)
      << text;
}

TEST(Products, OfATowerHaveBiasesAndAreHeldWhole) {
  std::vector<GemmShape> tower;
  for (const auto& shape : gemm_shapes(models_of_all_families().at("hf_qwen3_vl")))
    if (shape.name.starts_with(kVisionModel)) tower.push_back(shape);
  EXPECT_EQ(names(tower),
            "vision_model.decoder.layers.0.self_attention.linear_qkv "
            "vision_model.decoder.layers.0.self_attention.linear_proj "
            "vision_model.decoder.layers.0.mlp.linear_fc1 "
            "vision_model.decoder.layers.0.mlp.linear_fc2 "
            "vision_model.merger.linear_fc1 vision_model.merger.linear_fc2 "
            "vision_model.decoder.deepstack_merger_list.0.linear_fc1 "
            "vision_model.decoder.deepstack_merger_list.0.linear_fc2 ");
  for (const auto& shape : tower) {
    EXPECT_TRUE(shape.has_bias) << shape.name;
    EXPECT_FALSE(shape.cut.has_value()) << shape.name;
  }
}

TEST(Products, OfExpertsHaveNoBiasOfTheirOwn) {
  for (const auto& shape : gemm_shapes(models_of_all_families().at("hf_gpt_oss"))) {
    const bool biased = !shape.grouped && shape.name != "output_layer";
    EXPECT_EQ(shape.has_bias, biased) << shape.name;
  }
}

// Two kinds of attention, and norms of each layer's own embedding.
TEST(Products, NormsAndAttentionAreThoseOfEachKindOfLayer) {
  const auto gemma = models_of_all_families().at("hf_gemma4_text");
  EXPECT_EQ(norm_widths(gemma), (std::set{gemma.hidden_size, gemma.kv_channels,
                                          gemma.global_kv_channels, gemma.per_layer_embed_dim}));
  EXPECT_NE(gemma.kv_channels, gemma.global_kv_channels);
  EXPECT_EQ(attention_shapes(gemma),
            (std::set<AttentionShape>{{gemma.num_attention_heads, gemma.num_query_groups,
                                       gemma.kv_channels, gemma.kv_channels},
                                      {gemma.num_attention_heads, gemma.num_global_query_groups,
                                       gemma.global_kv_channels, gemma.global_kv_channels}}));
}

TEST(Products, NormsOfDeltaNetsAreOverTheirHeads) {
  const auto config = models_of_all_families().at("hf_qwen3_next");
  EXPECT_EQ(norm_widths(config),
            (std::set{config.hidden_size, config.kv_channels, config.linear_value_head_dim}));
}

TEST(Products, NormsOfMambaAreOverTheGroupsOfAMixer) {
  const auto config = models_of_all_families().at("hf_nemotron_h");
  ASSERT_GT(config.mamba_num_groups, 1);
  EXPECT_TRUE(norm_widths(config).contains(config.mamba_num_heads * config.mamba_head_dim /
                                           config.mamba_num_groups));
}

TEST(Products, OfLatentAttentionHaveKeysAndValuesOfTwoSizes) {
  const auto config = models_of_all_families().at("hf_deepseek_v3");
  const auto heads = config.num_attention_heads;
  EXPECT_EQ(norm_widths(config),
            (std::set{config.hidden_size, config.q_lora_rank, config.kv_lora_rank}));
  EXPECT_EQ(
      attention_shapes(config),
      (std::set<AttentionShape>{
          {heads, heads, config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim}}));
}

// LayerNorms, of a tower and of an indexer, have a bias and are other operations.
TEST(Products, NormsWithABiasAreLeftOut) {
  const auto seeing = models_of_all_families().at("hf_qwen3_vl");
  EXPECT_FALSE(norm_widths(seeing).contains(seeing.vision->hidden_size));
  const auto sparse = models_of_all_families().at("hf_glm_moe_dsa");
  EXPECT_EQ(norm_widths(sparse),
            (std::set{sparse.hidden_size, sparse.q_lora_rank, sparse.kv_lora_rank}));
}

TEST(Products, NormsAreOfEveryFamily) {
  for (const auto& [name, config] : models_of_all_families()) {
    EXPECT_TRUE(norm_widths(config).contains(config.hidden_size)) << name;
    EXPECT_FALSE(attention_shapes(config).empty()) << name;
  }
}

}  // namespace products_test
}  // namespace ferry::models
