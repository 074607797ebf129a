#include "models/spec/sharding.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "tests/support/expect.h"

namespace ferry::models {
namespace sharding_test {

using support::fails;

TransformerConfig dense() {
  return {.num_layers = 4,
          .hidden_size = 16,
          .ffn_hidden_size = 24,
          .num_attention_heads = 8,
          .num_query_groups = 4,
          .kv_channels = 2,
          .vocab_size = 50,
          .add_bias_linear = true,
          .qk_layernorm = true};
}

TransformerConfig experts() {
  auto config = dense();
  config.num_moe_experts = 4;
  config.moe_layer_freq = {false, true, true, true};
  config.moe_ffn_hidden_size = 8;
  config.moe_shared_expert_intermediate_size = 16;
  config.moe_shared_expert_gate = true;
  config.moe_router_score_function = ScoreFunction::kSigmoid;
  config.moe_router_enable_expert_bias = true;
  return config;
}

TransformerConfig latent() {
  auto config = experts();
  config.multi_latent_attention = true;
  config.q_lora_rank = 6;
  config.kv_lora_rank = 10;
  config.qk_head_dim = 2;
  config.qk_pos_emb_head_dim = 4;
  config.v_head_dim = 2;
  config.mtp_num_layers = 1;
  return config;
}

std::vector<ParameterSpec> held_by(const TransformerConfig& config,
                                   const MeshShape& mesh,
                                   int rank,
                                   Alignment alignment) {
  std::vector<ParameterSpec> all;
  const auto at = mesh.coordinates(rank);
  for (const auto& chunk : stage_chunks(config, mesh.parallel(), at.pp)) {
    for (auto& spec : parameter_layout(config, mesh, at, chunk, {.alignment = alignment}))
      all.push_back(std::move(spec));
  }
  return all;
}

const ParameterSpec& find(const std::vector<ParameterSpec>& specs, const std::string& key) {
  const auto found = std::ranges::find(specs, key, &ParameterSpec::key);
  if (found == specs.end()) fail(ErrorKind::kNotFound, "{}", key);
  return *found;
}

struct Case {
  std::string name{};
  TransformerConfig config{};
  ParallelConfig parallel{};
  int dp = 1;
};

class Cover : public testing::TestWithParam<std::tuple<Case, Alignment>> {};

// Marks each element of each parameter as often as some main replica holds it.
TEST_P(Cover, EveryElementIsOnOneMainReplica) {
  const auto& [one, alignment] = GetParam();
  const MeshShape mesh(one.parallel, one.parallel.world_size() * one.dp);
  struct Held {
    distckpt::Shape shape{};
    std::vector<int> times{};
  };
  std::map<std::string, Held> parameters;
  for (int rank = 0; rank < mesh.world_size(); ++rank) {
    for (const auto& spec : held_by(one.config, mesh, rank, alignment)) {
      auto& held = parameters[spec.key];
      if (held.times.empty()) {
        held.shape = spec.global_shape;
        held.times.resize(static_cast<std::size_t>(spec.global_shape.product()));
      }
      ASSERT_EQ(held.shape, spec.global_shape) << spec.key;
      std::int64_t rows = 0;
      for (const auto& box : spec.boxes) rows += box.size[0];
      ASSERT_EQ(rows, spec.shape[0]) << spec.key;
      if (spec.replica_id != std::vector<int>{0, 0, 0}) continue;
      const auto width = held.shape.rank() == 2 ? held.shape[1] : 1;
      for (const auto& box : spec.boxes) {
        for (auto row = box.offset[0]; row < box.end(0); ++row) {
          const auto from = box.rank() == 2 ? box.offset[1] : 0;
          const auto count = box.rank() == 2 ? box.size[1] : 1;
          for (auto column = from; column < from + count; ++column)
            ++held.times[static_cast<std::size_t>(row * width + column)];
        }
      }
    }
  }
  ASSERT_GT(parameters.size(), 20U);
  for (const auto& [key, held] : parameters) {
    EXPECT_TRUE(std::ranges::all_of(held.times, [](int times) { return times == 1; })) << key;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Of,
    Cover,
    testing::Combine(
        testing::Values(Case{"dense", dense(), {}},
                        Case{"dense_tp4_dp2", dense(), {.tensor_model_parallel_size = 4}, 2},
                        Case{"dense_tp8", dense(), {.tensor_model_parallel_size = 8}},
                        Case{"dense_pp2_vpp2",
                             dense(),
                             {.pipeline_model_parallel_size = 2,
                              .virtual_pipeline_model_parallel_size = 2}},
                        Case{"experts_tp2_ep4_etp1",
                             experts(),
                             {.tensor_model_parallel_size = 2,
                              .expert_model_parallel_size = 4,
                              .expert_tensor_parallel_size = 1}},
                        Case{"experts_pp2_ep2_etp4",
                             experts(),
                             {.tensor_model_parallel_size = 4,
                              .pipeline_model_parallel_size = 2,
                              .expert_model_parallel_size = 2}},
                        Case{"latent_tp2_pp2_ep2",
                             latent(),
                             {.tensor_model_parallel_size = 2,
                              .pipeline_model_parallel_size = 2,
                              .expert_model_parallel_size = 2}}),
        testing::Values(Alignment::kFast, Alignment::kBitwise)),
    [](const auto& test) {
      return std::get<0>(test.param).name +
             (std::get<1>(test.param) == Alignment::kFast ? "_fast" : "_bitwise");
    });

TEST(ParameterLayout, CutsGateAndUpEachOnItsOwn) {
  const MeshShape mesh({.tensor_model_parallel_size = 4}, 4);
  const auto specs = held_by(dense(), mesh, 1, Alignment::kFast);
  const auto& fc1 = find(specs, "decoder.layers.0.mlp.linear_fc1.weight");
  EXPECT_EQ(fc1.shape, (distckpt::Shape{12, 16}));
  ASSERT_EQ(fc1.boxes.size(), 2U);
  EXPECT_EQ(fc1.boxes[0].offset[0], 6);   // rows 6 to 12 of the gate
  EXPECT_EQ(fc1.boxes[1].offset[0], 30);  // and 6 to 12 behind the 24 of the gate
}

TEST(ParameterLayout, CutsWhatRowsReduceByColumnsAndInBitwiseByRows) {
  const MeshShape mesh({.tensor_model_parallel_size = 4}, 4);
  const auto shape_of = [&](Alignment alignment) {
    return find(held_by(dense(), mesh, 3, alignment), "decoder.layers.1.mlp.linear_fc2.weight")
        .shape;
  };
  EXPECT_EQ(shape_of(Alignment::kFast), (distckpt::Shape{16, 6}));
  EXPECT_EQ(shape_of(Alignment::kBitwise), (distckpt::Shape{4, 24}));
}

TEST(ParameterLayout, PadsTheVocabularyToAMultipleOfTheRanks) {
  const MeshShape mesh({.tensor_model_parallel_size = 4, .make_vocab_size_divisible_by = 8}, 4);
  const auto specs = held_by(dense(), mesh, 0, Alignment::kFast);
  const auto& table = find(specs, "embedding.word_embeddings.weight");
  EXPECT_EQ(table.global_shape, (distckpt::Shape{64, 16}));
  EXPECT_EQ(table.shape, (distckpt::Shape{16, 16}));
  EXPECT_EQ(table.vocab, 50);
}

TEST(ParameterLayout, KeepsARoutersBiasInFp32AndUntrained) {
  const MeshShape mesh({}, 1);
  const auto specs = held_by(experts(), mesh, 0, Alignment::kFast);
  const auto& bias = find(specs, "decoder.layers.1.mlp.router.expert_bias");
  EXPECT_EQ(bias.dtype, distckpt::DType::kF32);
  EXPECT_FALSE(bias.trained);
  EXPECT_TRUE(find(specs, "decoder.layers.1.mlp.router.weight").trained);
}

TEST(ParameterLayout, RepeatsATiedEmbeddingWhereTheLossIs) {
  auto config = dense();
  config.untie_embeddings_and_output_weights = false;
  const MeshShape mesh({.pipeline_model_parallel_size = 2}, 2);
  EXPECT_EQ(find(held_by(config, mesh, 0, Alignment::kFast), "embedding.word_embeddings.weight")
                .replica_id[0],
            0);
  EXPECT_EQ(find(held_by(config, mesh, 1, Alignment::kFast), "embedding.word_embeddings.weight")
                .replica_id[0],
            1);
  EXPECT_EQ(embedding_stages(config, mesh.parallel()), (std::vector<int>{0, 1}));
  EXPECT_EQ(embedding_stages(dense(), mesh.parallel()), (std::vector<int>{0}));
}

TEST(CheckFits, NamesTheSizeThatDoesNotDivide) {
  const auto refuses = [](const TransformerConfig& config, const ParallelConfig& parallel,
                          const std::string& said) {
    return fails(ErrorKind::kUsage, {said}, [&] {
      check_fits(config, {parallel, parallel.world_size()});
    });
  };
  EXPECT_NO_THROW(check_fits(dense(), {{.tensor_model_parallel_size = 8}, 8}));
  EXPECT_TRUE(refuses(dense(), {.tensor_model_parallel_size = 3},
                      "8 attention heads cannot be split by tp 3"));
  auto groups = dense();
  groups.num_attention_heads = 12;
  groups.num_query_groups = 6;
  EXPECT_TRUE(refuses(groups, {.tensor_model_parallel_size = 4}, "6 query groups"));
  auto narrow = dense();
  narrow.ffn_hidden_size = 20;
  EXPECT_TRUE(refuses(narrow, {.tensor_model_parallel_size = 8}, "20 rows"));
  EXPECT_TRUE(
      refuses(experts(), {.expert_model_parallel_size = 3}, "4 experts cannot be split by ep 3"));
  EXPECT_TRUE(refuses(dense(), {.expert_model_parallel_size = 2}, "the model has no experts"));
}

TEST(CheckFits, SharesOutKeyHeadsOfDeltaNetsByTensorAndContextParallelism) {
  auto config = dense();
  config.linear_attention_freq.assign(static_cast<std::size_t>(config.num_layers), true);
  config.linear_conv_kernel_dim = 4;
  config.linear_key_head_dim = config.linear_value_head_dim = 8;
  config.linear_num_key_heads = 4;
  config.linear_num_value_heads = 8;
  const auto check = [&](int tp, int cp) {
    check_fits(config, {{.tensor_model_parallel_size = tp, .context_parallel_size = cp}, tp * cp});
  };
  EXPECT_NO_THROW(check(2, 2));
  EXPECT_NO_THROW(check(1, 4));
  EXPECT_TRUE(fails(ErrorKind::kUsage,
                    {"4 key heads of linear attention cannot be split by tp 2 and then by cp 4"},
                    [&] { check(2, 4); }));
}

// A bucket of an optimizer lays out parameters by these places.
TEST(ParameterTable, RegistersEachParameterOfALayerAtAPlaceOfItsOwn) {
  for (const auto& config : {dense(), experts(), latent()}) {
    std::set<int> places;
    for (const auto& section : layer_sections(config, 1)) {
      for (const auto& row : section.table->rows) {
        if (!row.when(config) || row.fp32) continue;
        EXPECT_TRUE(places.insert(row.registered).second) << row.name;
      }
    }
  }
}

}  // namespace sharding_test
}  // namespace ferry::models
