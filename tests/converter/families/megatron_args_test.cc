#include "converter/families/megatron_args.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "converter/families/hf_config.h"
#include "converter/families/megatron_fields.h"
#include "converter/optimizer/common_state.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"

namespace ferry::converter {
namespace megatron_args_test {

using distckpt::Pickle;
using distckpt::PickleWriter;
using models::TransformerConfig;
using support::fails;

constexpr std::string_view kGlobals[] = {"argparse.Namespace"};

Pickle parse(PickleWriter& pickle) {
  return Pickle::parse(pickle.finish(), {.source = "common.pt", .allowed_globals = kGlobals});
}

// The arguments of a small model, and what else `more` sets: of two of a name the last counts.
TransformerConfig read(const std::function<void(PickleWriter&)>& more) {
  PickleWriter pickle;
  pickle.begin_dict().string("args").begin_object("argparse.Namespace");
  for (const auto* key : {"num_layers", "num_attention_heads"}) pickle.string(key).integer(4);
  for (const auto* key : {"hidden_size", "ffn_hidden_size"}) pickle.string(key).integer(64);
  more(pickle);
  pickle.end_object().end_dict();
  return read_args(parse(pickle).root()).value();
}

TransformerConfig read_integer(std::string_view key, std::int64_t value) {
  return read([&](PickleWriter& pickle) {
    pickle.string("num_experts").integer(8).string(key).integer(value);
  });
}

// Megatron's arguments say every field that a config.json says and that both have.
TEST(MegatronArgs, TellEveryFamilyBack) {
  for (const auto* name : {"hf_llama", "hf_qwen2", "hf_qwen2_tied", "hf_qwen3", "hf_mixtral",
                           "hf_qwen2_moe", "hf_qwen3_moe", "hf_deepseek_v2", "hf_deepseek_v3",
                           "hf_moonlight", "hf_gpt_oss", "hf_nemotron_h", "hf_smollm3"}) {
    SCOPED_TRACE(name);
    const auto path = support::test_data(name) / "hf/config.json";
    const auto config = parse_hf_config(distckpt::read_text(path), path.string());
    PickleWriter pickle;
    write_common_state(pickle, config, {}, {}, std::nullopt);
    const auto args = read_args(parse(pickle).root());
    ASSERT_TRUE(args.has_value());
    EXPECT_NO_THROW(require_same_model(*args, config, "args", path.string()));
    EXPECT_EQ(*args, config);
  }
}

// Each member that arguments hold as it is, but those that others leave at their default.
TEST(MegatronArgs, ContradictAConfigurationInAnyMember) {
  for (const auto* name : {"hf_deepseek_v3", "hf_qwen3_next", "hf_nemotron_h"}) {
    const auto path = support::test_data(name) / "hf/config.json";
    const auto config = parse_hf_config(distckpt::read_text(path), path.string());
    int told = 0;
    const auto contradict = [&](std::span<const AnyField> fields) {
      each_field(fields, [&](const auto& field) {
        auto other = config;
        auto& member = other.*field.member;
        using Value = std::remove_reference_t<decltype(member)>;
        if constexpr (std::is_same_v<Value, bool>)
          member = !member;
        else
          member += 1;
        if (field.compared == Compared::kNever || member == field.otherwise) return;
        ++told;
        EXPECT_TRUE(fails(ErrorKind::kCorrupt, {std::string(field.argument)},
                          [&] { require_same_model(other, config, "args", "here"); }))
            << name << " " << field.argument;
      });
    };
    contradict(kModelFields);
    contradict(kRotaryFields);
    contradict(kBiasFields);
    contradict(kHeadFields);
    contradict(kLinearAttentionFields);
    contradict(kMambaFields);
    if (config.num_moe_experts > 0) contradict(kRouterFields);
    if (config.multi_latent_attention) contradict(kLatentFields);
    EXPECT_GT(told, 15);
  }
}

TEST(MegatronArgs, TellYarnAndGroupsOfRoutersBack) {
  const auto path = support::test_data("hf_deepseek_v3") / "hf/config.json";
  auto config = parse_hf_config(distckpt::read_text(path), path.string());
  EXPECT_EQ(config.moe_router_num_groups, 4);
  EXPECT_EQ(config.moe_router_group_topk, 2);
  EXPECT_EQ(config.moe_router_topk_scaling_factor, 2.5);
  EXPECT_EQ(config.moe_router_score_function, models::ScoreFunction::kSigmoid);
  EXPECT_TRUE(config.moe_router_enable_expert_bias);
  EXPECT_EQ(config.moe_layer_freq, (std::vector<bool>{false, true, true}));
  EXPECT_EQ(config.moe_shared_expert_intermediate_size, 48);
  EXPECT_EQ(config.mtp_num_layers, 1);
  config.rope_scaling = {.type = models::RopeType::kYarn,
                         .factor = 40.0,
                         .beta_fast = 32.0,
                         .beta_slow = 1.0,
                         .mscale = 1.0,
                         .mscale_all_dim = 1.0,
                         .original_max_position_embeddings = 4096};
  PickleWriter pickle;
  write_common_state(pickle, config, {}, {}, std::nullopt);
  const auto common = parse(pickle);
  const auto args = common.root().at("args");
  EXPECT_EQ(args.at("rope_type").as_string(), "yarn");
  EXPECT_EQ(args.at("rotary_scaling_factor").as_float(), 40.0);
  EXPECT_EQ(args.at("original_max_position_embeddings").as_int(), 4096);
}

// The model with this scaling that its arguments alone describe.
models::RopeScaling told_back(std::string_view name, const models::RopeScaling& scaling) {
  const auto path = support::test_data(name) / "hf/config.json";
  auto config = parse_hf_config(distckpt::read_text(path), path.string());
  config.rope_scaling = scaling;
  PickleWriter pickle;
  write_common_state(pickle, config, {}, {}, std::nullopt);
  return read_args(parse(pickle).root()).value().rope_scaling;
}

TEST(MegatronArgs, TellYarnBackOfEitherAttention) {
  models::RopeScaling scaling{.type = models::RopeType::kYarn,
                              .factor = 40.0,
                              .beta_fast = 16.0,
                              .beta_slow = 2.0,
                              .original_max_position_embeddings = 1024};
  const auto plain = [](models::RopeScaling of) {
    of.truncate = true;  // as Megatron-Core takes it where nothing is said
    return of;
  };
  for (const auto& [mscale, all_dim] :
       std::vector<std::pair<std::optional<double>, std::optional<double>>>{
           {std::nullopt, std::nullopt}, {1.0, 1.0}, {0.707, 0.5}}) {
    scaling.mscale = mscale;
    scaling.mscale_all_dim = all_dim;
    EXPECT_EQ(told_back("hf_deepseek_v3", scaling), scaling);
    EXPECT_EQ(told_back("hf_llama", scaling), plain(scaling));
  }
  // transformers heeds the two together; Megatron-Core each by itself.
  scaling.mscale_all_dim = std::nullopt;
  EXPECT_EQ(told_back("hf_llama", scaling).mscale, std::nullopt);
  EXPECT_EQ(told_back("hf_llama", scaling).attention_factor, std::nullopt);
  scaling.attention_factor = 1.25;
  EXPECT_NEAR(told_back("hf_llama", scaling).attention_factor.value(), 1.25, 1e-12);
  EXPECT_NEAR(told_back("hf_deepseek_v3", scaling).attention_factor.value(), 1.25, 1e-12);
}

TEST(MegatronArgs, SayYarnOfLatentAttentionWhereNothingIsSaidOfItsType) {
  const auto scaling = [](std::optional<std::string_view> type, double factor) {
    return read([&](PickleWriter& pickle) {
             pickle.string("multi_latent_attention").boolean(true);
             if (type) pickle.string("rope_type").string(*type);
             pickle.string("rotary_scaling_factor").real(factor);
             pickle.string("mscale").real(1.0).string("mscale_all_dim").real(0.5);
           })
        .rope_scaling;
  };
  EXPECT_EQ(scaling(std::nullopt, 40.0).type, models::RopeType::kYarn);
  EXPECT_EQ(scaling(std::nullopt, 40.0).original_max_position_embeddings, 4096);
  EXPECT_EQ(scaling(std::nullopt, 40.0).mscale_all_dim, 0.5);
  EXPECT_EQ(scaling(std::nullopt, 1.0), models::RopeScaling{});
  EXPECT_EQ(scaling("rope", 40.0), models::RopeScaling{});
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"rope_type is \"ntk\""}, [&] { scaling("ntk", 40.0); }));
}

TEST(MegatronArgs, RefusesSizesThatNoModelHas) {
  EXPECT_EQ(read_integer("num_experts", 16).num_moe_experts, 16);
  constexpr auto kHuge = std::numeric_limits<std::int64_t>::max();
  for (const std::string key :
       {"num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels",
        "vocab_size", "max_position_embeddings", "num_experts", "moe_ffn_hidden_size",
        "moe_shared_expert_intermediate_size", "mtp_num_layers", "moe_layer_freq"}) {
    for (const auto value : {std::int64_t{-1}, kHuge}) {
      EXPECT_TRUE(fails(ErrorKind::kCorrupt, {key + " is " + std::to_string(value)},
                        [&] { read_integer(key, value); }));
    }
  }
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"65536 layers of 8 experts"},
                    [&] { read_integer("num_layers", 65536); }));
}

TEST(MegatronArgs, NameTheScoreFunctionsThatThereAre) {
  const auto router = [](std::string_view function) {
    return read([&](PickleWriter& pickle) {
      pickle.string("num_experts").integer(8).string("moe_router_score_function").string(function);
    });
  };
  EXPECT_EQ(router("softmax").moe_router_score_function, models::ScoreFunction::kSoftmax);
  EXPECT_TRUE(fails(ErrorKind::kLayout,
                    {"the checkpoint's arguments", "moe_router_score_function is \"tanh\"",
                     "none of softmax, sigmoid"},
                    [&] { router("tanh"); }));
}

TEST(MegatronArgs, RefusesHeadsThatDoNotFillTheirGroups) {
  const auto groups = [](std::int64_t count) {
    return read([&](PickleWriter& pickle) {
      pickle.string("group_query_attention").boolean(true);
      pickle.string("num_query_groups").integer(count);
    });
  };
  EXPECT_EQ(groups(2).num_query_groups, 2);
  EXPECT_TRUE(
      fails(ErrorKind::kCorrupt, {"4 attention heads in 3 query groups"}, [&] { groups(3); }));
}

TEST(MegatronArgs, RefusesHeadsWhoseSizeNothingSays) {
  const auto heads = [](std::int64_t count) {
    return read([&](PickleWriter& pickle) { pickle.string("num_attention_heads").integer(count); });
  };
  EXPECT_EQ(heads(2).kv_channels, 32);
  for (const std::int64_t count : {3, 128}) {
    EXPECT_TRUE(fails(ErrorKind::kCorrupt,
                      {"hidden_size of 64", std::to_string(count) + " heads", "kv_channels"},
                      [&] { heads(count); }));
  }
}

// transformer_config.py of megatron-core: the last of every N layers, or a list.
TEST(MegatronArgs, CountLayersThatDoNotTurn) {
  const auto every_second =
      read([](PickleWriter& pickle) { pickle.string("no_rope_freq").integer(2); });
  EXPECT_EQ(every_second.no_rope_freq, (std::vector<bool>{false, true, false, true}));
  EXPECT_EQ(every_second.family, "smollm3");
  const auto of_list = [](int first) {
    return read([&](PickleWriter& pickle) {
      auto& list = pickle.string("no_rope_freq").begin_list();
      for (const int none : {first, 0, 0, 0}) list.integer(none);
      list.end_list();
    });
  };
  const auto listed = of_list(1);
  EXPECT_EQ(listed.no_rope_freq, (std::vector<bool>{true, false, false, false}));
  EXPECT_TRUE(of_list(0).no_rope_freq.empty());
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"no_rope_freq is not as here says"},
                    [&] { require_same_model(listed, every_second, "args", "here"); }));
}

TEST(MegatronArgs, RefusesNumbersThatAreNone) {
  for (const auto value :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"rotary_base"}, [&] {
      read([&](PickleWriter& pickle) { pickle.string("rotary_base").real(value); });
    }));
  }
}

TEST(MegatronArgs, ReadsAWindow) {
  const auto window = [](std::int64_t left) {
    return read([&](PickleWriter& pickle) {
      pickle.string("window_size").begin_tuple().integer(left).integer(0).end_tuple();
    });
  };
  EXPECT_EQ(window(4095).sliding_window, 4096);
  EXPECT_EQ(window(-1).sliding_window, std::nullopt);  // as Transformer Engine spells "all"
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"window_size is (-2, 0)"}, [&] { window(-2); }));
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"window_size"},
                    [&] { window(std::numeric_limits<std::int64_t>::max()); }));
}

}  // namespace megatron_args_test
}  // namespace ferry::converter
