// Checkpoints of models with experts, in every form that Megatron-Core keeps them in, whole and
// with something wrong.
#include "converter/families/megatron_links.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "distckpt/plan/coverage.h"
#include "tests/support/expect.h"

namespace ferry::converter {
namespace megatron_links_test {

using distckpt::Box;
using distckpt::Layout;
using distckpt::Shape;
using support::fails;

models::TransformerConfig mixtral() {
  return {.family = "mixtral",
          .num_layers = 2,
          .hidden_size = 6,
          .ffn_hidden_size = 4,
          .num_attention_heads = 2,
          .num_query_groups = 1,
          .kv_channels = 2,
          .vocab_size = 10,
          .num_moe_experts = 3,
          .moe_layer_freq = {true, true},
          .moe_ffn_hidden_size = 4,
          .moe_router_topk = 2};
}

models::TransformerConfig deepseek() {
  auto config = mixtral();
  config.family = "deepseek_v3";
  config.moe_layer_freq = {false, true};
  config.moe_shared_expert_intermediate_size = 5;
  config.moe_router_enable_expert_bias = true;
  config.multi_latent_attention = true;
  config.q_lora_rank = 3;
  config.kv_lora_rank = 4;
  config.qk_head_dim = 2;
  config.qk_pos_emb_head_dim = 2;
  config.v_head_dim = 3;
  config.mtp_num_layers = 1;
  return config;
}

// The forms in which experts are kept.
enum class Form {
  kStacked,       // layers too, where they are of one kind
  kOfLayer,       // an expert axis, a key for each layer
  kSingleExpert,  // a key for each expert
  kHalves,        // and for gate and up
};

// Changes a tensor on its way into the layout; false leaves it out.
using Change = std::function<bool(std::string& key, Shape& shape)>;

Layout stored(const ModelMap& map, Form form, const Change& change = {}) {
  Layout layout;
  const auto add = [&](std::string key, Shape shape) {
    if (change && !change(key, shape)) return;
    if (!layout.find(key)) layout.add_tensor({.name = key, .shape = shape});
  };
  for (const auto& tensor : map.megatron) {
    auto shape = tensor.shape;
    if (tensor.expert && form >= Form::kSingleExpert) {
      const auto key = models::with_expert(tensor.key, *tensor.expert);
      if (form == Form::kSingleExpert || tensor.merge != Merge::kGateUp) {
        add(key, shape);
        continue;
      }
      shape[0] /= 2;
      add(key + "_w", shape);
      add(key + "_v", shape);
      continue;
    }
    if (tensor.expert) shape.push_front(map.config.num_moe_experts);
    const bool stacked = form == Form::kStacked && map.written_key(tensor) == tensor.stacked_key;
    if (stacked) shape.push_front(map.config.num_layers);
    add(stacked ? tensor.stacked_key : tensor.key, shape);
  }
  return layout;
}

constexpr Form kForms[] = {Form::kStacked, Form::kOfLayer, Form::kSingleExpert, Form::kHalves};

TEST(MegatronLinks, LinkEveryElementOnceInEveryForm) {
  for (const auto& config : {mixtral(), deepseek()}) {
    const auto map = make_model_map(config);
    for (const auto form : kForms) {
      SCOPED_TRACE(fmt::format("{} in form {}", config.family, static_cast<int>(form)));
      const auto layout = stored(map, form);
      const auto links = link_megatron(map, layout);
      std::vector<std::vector<Box>> of_model(map.tensors.size());
      std::vector<std::vector<Box>> of_stored(layout.tensors().size());
      for (const auto& link : links.links) {
        of_model[link.model].push_back(link.model_box);
        of_stored[link.stored].push_back(link.stored_box);
      }
      for (std::size_t i = 0; i < of_model.size(); ++i) {
        EXPECT_NO_THROW(distckpt::require_exactly_once(map.tensors[i].name, map.tensors[i].shape,
                                                       of_model[i], "linked"));
      }
      for (std::uint32_t i = 0; i < of_stored.size(); ++i) {
        EXPECT_NO_THROW(distckpt::require_exactly_once(
            layout.tensor(i).name, layout.tensor(i).shape, of_stored[i], "linked"));
      }
    }
  }
}

TEST(MegatronLinks, NameTheExpertThatIsMissing) {
  const auto map = make_model_map(mixtral());
  const auto without = [&](Form form, std::string_view lost) {
    return stored(map, form, [&](std::string& key, Shape&) { return key != lost; });
  };
  const std::string fc1 = "decoder.layers.1.mlp.experts.experts.2.linear_fc1.weight";
  for (const auto& [form, lost] : {std::pair{Form::kSingleExpert, fc1},
                                   {Form::kHalves, fc1 + "_w"},
                                   {Form::kHalves, fc1 + "_v"}}) {
    EXPECT_TRUE(fails(ErrorKind::kLayout,
                      {"decoder.layers.1.mlp.experts.experts.linear_fc1.weight of expert 2",
                       "is missing", "model.layers.1.block_sparse_moe.experts.2.w1.weight"},
                      [&] { link_megatron(map, without(form, lost)); }));
  }
  EXPECT_TRUE(fails(ErrorKind::kLayout,
                    {"decoder.layers.0.mlp.experts.experts.linear_fc2.weight of expert 0",
                     "and so is decoder.layers.mlp.experts.experts.linear_fc2.weight"},
                    [&] {
                      link_megatron(
                          map, without(Form::kStacked,
                                       "decoder.layers.mlp.experts.experts.linear_fc2.weight"));
                    }));
}

TEST(MegatronLinks, NameTheTensorOfAnotherShape) {
  struct Case {
    models::TransformerConfig config;
    Form form;
    std::string_view key;
    int dim;
    std::int64_t change;
    std::string_view expected;
  };
  const std::vector<Case> cases{
      {mixtral(), Form::kStacked, "decoder.layers.mlp.router.weight", 1, -1, "[2, 3, 6]"},
      {mixtral(), Form::kStacked, "decoder.layers.mlp.experts.experts.linear_fc1.weight", 0, 1,
       "[2, 3, 8, 6]"},
      {mixtral(), Form::kStacked, "decoder.layers.mlp.experts.experts.linear_fc1.weight", 1, 1,
       "[2, 3, 8, 6]"},
      {mixtral(), Form::kStacked, "decoder.layers.mlp.experts.experts.linear_fc1.weight", 2, -1,
       "[2, 3, 8, 6]"},
      {mixtral(), Form::kOfLayer, "decoder.layers.1.mlp.experts.experts.linear_fc2.weight", 0, -1,
       "[3, 6, 4]"},
      {mixtral(), Form::kSingleExpert, "decoder.layers.1.mlp.experts.experts.1.linear_fc1.weight",
       0, -1, "[8, 6]"},
      {mixtral(), Form::kHalves, "decoder.layers.1.mlp.experts.experts.1.linear_fc1.weight_v", 0, 1,
       "[4, 6]"},
      {deepseek(), Form::kOfLayer, "decoder.layers.1.mlp.shared_experts.linear_fc1.weight", 0, -5,
       "[10, 6]"},
      {deepseek(), Form::kOfLayer, "decoder.layers.1.mlp.router.expert_bias", 0, 1, "[3]"},
      {deepseek(), Form::kOfLayer, "decoder.layers.0.self_attention.linear_kv_down_proj.weight", 0,
       -2, "[6, 6]"},
      {deepseek(), Form::kOfLayer, "mtp.layers.0.eh_proj.weight", 1, -6, "[6, 12]"},
      {deepseek(), Form::kOfLayer,
       "mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc2.weight", 0, 1, "[3, 6, 4]"},
  };
  for (const auto& one : cases) {
    const auto map = make_model_map(one.config);
    bool met = false;
    const auto layout = stored(map, one.form, [&](std::string& key, Shape& shape) {
      if (key == one.key) {
        met = true;
        shape[one.dim] += one.change;
      }
      return true;
    });
    EXPECT_TRUE(met) << one.key;
    EXPECT_TRUE(fails(ErrorKind::kLayout,
                      {fmt::format("{}: has shape", one.key),
                       fmt::format("expected {}", one.expected), "for model.layers."},
                      [&] { link_megatron(map, layout); }));
  }
}

TEST(MegatronLinks, NameWhatNoRuleMaps) {
  const auto map = make_model_map(mixtral());
  for (const std::string& surplus : std::vector<std::string>{
           "decoder.layers.1.mlp.experts.experts.3.linear_fc1.weight",
           "decoder.layers.1.mlp.experts.experts.linear_fc1.weight",  // stacked as well
           "decoder.layers.2.mlp.router.weight",
           "decoder.layers.mlp.shared_experts.linear_fc1.weight",
           "decoder.layers.mlp.router.expert_bias", "mtp.layers.0.enorm.weight"}) {
    auto layout = stored(map, Form::kStacked);
    layout.add_tensor({.name = surplus, .shape = {3, 8, 6}});
    EXPECT_TRUE(fails(ErrorKind::kLayout, {surplus + ": no rule of the family mixtral"},
                      [&] { link_megatron(map, layout); }));
  }
  auto layout = stored(map, Form::kStacked);
  layout.add_tensor({.name = "module.decoder.layers.mlp.router.weight", .shape = {2, 3, 6}});
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"router.weight: is there twice"},
                    [&] { link_megatron(map, layout); }));
}

TEST(MegatronLinks, RefuseExtraStatesOfExpertsThatAreIncompleteOrUnknown) {
  const auto map = make_model_map(mixtral());
  const std::string fc1 = "decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_";
  std::vector<std::string> keys;
  for (int layer = 0; layer < 2; ++layer) {
    for (int expert = 0; expert < 3; ++expert)
      keys.push_back(fmt::format("{}{}.{}_2.3", fc1, layer, expert));
  }
  EXPECT_NO_THROW(check_object_keys(map, keys));
  keys.pop_back();
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"linear_fc1._extra_state: 5 of 6 parts"},
                    [&] { check_object_keys(map, keys); }));
  keys.push_back(fc1 + "1.2_2.4");
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"shard_1.2_2.4", "shape [2, 3]"},
                    [&] { check_object_keys(map, keys); }));
  keys.back() = "decoder.layers.0.mlp.experts.experts.3.linear_fc1._extra_state/shard_0_1";
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"experts.3.linear_fc1._extra_state"},
                    [&] { check_object_keys(map, keys); }));
}

TEST(ModelMap, RefusesLayersThatAFamilyLacks) {
  auto dense_layer = mixtral();
  dense_layer.moe_layer_freq = {true, false};
  EXPECT_TRUE(fails(ErrorKind::kLayout,
                    {"model.layers.1.", "the family mixtral has no layers without experts"},
                    [&] { make_model_map(dense_layer); }));
  auto experts = mixtral();
  experts.family = "llama";
  EXPECT_TRUE(fails(ErrorKind::kLayout,
                    {"model.layers.0.", "the family llama has no layers with experts"},
                    [&] { make_model_map(experts); }));
  auto prediction = mixtral();
  prediction.mtp_num_layers = 1;
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"the family mixtral has no prediction layers"},
                    [&] { make_model_map(prediction); }));
}

}  // namespace megatron_links_test
}  // namespace ferry::converter
