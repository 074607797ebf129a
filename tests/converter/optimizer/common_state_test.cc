#include "converter/optimizer/common_state.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace ferry::converter {
namespace common_state_test {

using distckpt::Pickle;
using distckpt::PickleWriter;

constexpr std::string_view kGlobals[] = {"argparse.Namespace"};

Pickle parse(PickleWriter& pickle) {
  return Pickle::parse(pickle.finish(), {.source = "common.pt", .allowed_globals = kGlobals});
}

models::TransformerConfig config() {
  return {.family = "llama",
          .num_layers = 2,
          .hidden_size = 16,
          .ffn_hidden_size = 24,
          .num_attention_heads = 4,
          .num_query_groups = 2,
          .kv_channels = 4,
          .vocab_size = 50};
}

// The common state of a run with a schedule and an optimizer of one parameter group.
Pickle carried() {
  PickleWriter pickle;
  pickle.begin_dict().string("iteration").integer(3).string("model0").integer(1);
  pickle.string("opt_param_scheduler").integer(7).string("num_samples").integer(9);
  pickle.string("optimizer").begin_dict().string("param_groups").integer(5).end_dict();
  pickle.end_dict();
  return parse(pickle);
}

Pickle written_with(const WrittenState& written, const std::optional<CarriedState>& state) {
  PickleWriter pickle;
  write_common_state(pickle, config(), {}, written, state);
  return parse(pickle);
}

std::set<std::string> keys_of(const Pickle& common) {
  std::set<std::string> keys;
  for (const auto& [key, _] : common.root().items()) keys.emplace(key.as_string());
  return keys;
}

TEST(CommonState, OfWeightsAloneHasNoOptimizer) {
  const auto common = written_with({.iteration = 10}, std::nullopt);
  EXPECT_EQ(keys_of(common),
            (std::set<std::string>{"args", "checkpoint_version", "iteration", "content_metadata",
                                   "num_floating_point_operations_so_far"}));
  EXPECT_EQ(common.root().at("iteration").as_int(), 10);
}

TEST(CommonState, CarriesWhatIsNotWrittenAnew) {
  const auto source = carried();
  const auto common = written_with({.iteration = 10}, CarriedState{.common = source.root()});
  EXPECT_EQ(common.root().at("num_samples").as_int(), 9);
  EXPECT_EQ(common.root().at("iteration").as_int(), 10);
  EXPECT_FALSE(keys_of(common).contains("model0"));
}

TEST(CommonState, TheScheduleGoesWithTheOptimizer) {
  const auto source = carried();
  const CarriedState state{.common = source.root(), .optimizers = {source.root().at("optimizer")}};
  EXPECT_FALSE(keys_of(written_with({}, state)).contains("opt_param_scheduler"));
  EXPECT_TRUE(keys_of(written_with({.optimizer = true}, state)).contains("opt_param_scheduler"));
}

TEST(CommonState, AnOptimizerKeepsItsParameterGroups) {
  const auto source = carried();
  const auto common = written_with(
      {.optimizer = true},
      CarriedState{.common = source.root(), .optimizers = {source.root().at("optimizer")}});
  const auto optimizer = common.root().at("optimizer");
  EXPECT_EQ(optimizer.at("optimizer").at("param_groups").as_int(), 5);
  EXPECT_EQ(optimizer.at("param_state_sharding_type").as_string(), "fully_reshardable");
  EXPECT_EQ(common.root().at("content_metadata").at("distrib_optim_sharding_type").as_string(),
            "fully_reshardable");
}

TEST(CommonState, OptimizersOfDenseAndExpertParametersAreNumbered) {
  const auto source = carried();
  const auto one = source.root().at("optimizer");
  const auto common = written_with({.optimizer = true},
                                   CarriedState{.common = source.root(), .optimizers = {one, one}});
  EXPECT_EQ(common.root().at("optimizer").size(), 2U);
}

}  // namespace common_state_test
}  // namespace ferry::converter
