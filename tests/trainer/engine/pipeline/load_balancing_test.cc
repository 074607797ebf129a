// tests/interop/train/test_load_balancing.py holds losses and biases to Megatron-Core's own.
#include "trainer/engine/pipeline/load_balancing.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/support/models/trainee.h"
#include "trainer/engine/micro_batches.h"

namespace ferry::trainer {
namespace load_balancing_test {

using models::ParallelConfig;
using support::WholeTensors;
using Metrics = std::map<std::string, double>;

struct Layout {
  const char* name;
  int ranks;
  ParallelConfig parallel{};
  models::ModelOptions options{.dtype = distckpt::DType::kF32};
};

Layout alone() {
  return {"alone", 1};
}

// Meshes and recomputations that run the same micro-batches as one rank alone.
std::vector<Layout> layouts() {
  const auto plain = alone().options;
  auto sequence = plain;
  sequence.sequence_parallel = true;
  auto full = plain;
  full.recompute.granularity = models::Recompute::Granularity::kFull;
  auto selective = plain;
  selective.recompute = {.granularity = models::Recompute::Granularity::kSelective,
                         .modules = {.moe = true}};
  return {{"tp2", 2, {.tensor_model_parallel_size = 2}, plain},
          {"tp2 sp ep2",
           2,
           {.tensor_model_parallel_size = 2,
            .expert_model_parallel_size = 2,
            .expert_tensor_parallel_size = 1},
           sequence},
          {"recomputed", 1, {}, full},
          {"pp2, recomputed", 2, {.pipeline_model_parallel_size = 2}, full},
          {"cp2, experts recomputed", 2, {.context_parallel_size = 2}, selective}};
}

models::TransformerConfig config_of(const std::string& family) {
  auto config = support::tiny_config({.family = family, .experts = 8});
  config.moe_router_topk = 2;
  return config;
}

// One step of a model that learns nothing, its rate being 0.
struct Outcome {
  WholeTensors moments{};  // of the gradients
  WholeTensors biases{};
  Metrics metrics{};
  std::vector<double> losses{};  // of each micro-batch, on one rank
};

struct Setting {
  models::TransformerConfig config{};
  LoadBalancingConfig balancing{};
  std::vector<Partition> parts{{0, 1}, {2, 3}};  // of each data parallel rank's sequences
  bool balances = true;
  bool forward_only = false;
  bool updates = true;
};

void run_rank(const Setting& run, const Layout& layout, models::World& world, Outcome& outcome) {
  const support::Trainee trainee(world, layout.parallel, run.config, layout.options);
  const auto& mesh = *trainee.mesh;
  LoadBalancing balancing(run.config, mesh, run.balancing);
  auto pipeline = trainee.pipeline();
  if (run.balances) pipeline.balancing = &balancing;
  const auto sequences =
      trainee.mine(support::random_sequences({9, 20, 5, 33}, run.config.vocab_size, 9));
  const auto batches = pack_micro_batches(sequences, run.parts, mesh);
  const LossFunction loss = [&](const models::GPTModel& model, const at::Tensor& hidden,
                                std::size_t i) {
    const auto& batch = batches[i];
    const auto ours = batch.local(at::ones({batch.num_tokens()}));
    const auto log_probs = model.log_probs(hidden, batch.tokens()).log_probs;
    const auto value = -(log_probs * ours).sum() / 67;
    return LossOutput{.loss = run.forward_only ? at::Tensor() : value,
                      .metrics = {{"loss", value.detach()}}};
  };
  trainee.optimizer->zero_grad();
  const auto losses = forward_backward(pipeline, batches, loss, {.forward_only = run.forward_only});
  trainee.optimizer->step({.lr = 0});
  const auto metrics = balancing.finish(trainee.pointers, run.updates);
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  outcome.metrics = metrics;
  if (world.size() == 1) {
    for (const auto& of : losses) outcome.losses.push_back(of.at("loss").item<double>());
  }
  for (const auto& shard : trainee.optimizer->sharded_state_dict()) {
    if (shard.tensor.key.starts_with("optimizer.state.exp_avg.")) outcome.moments.add(shard);
  }
  for (auto* const chunk : trainee.pointers) {
    for (const auto& parameter : chunk->parameters().all()) {
      if (parameter.spec.key.ends_with("expert_bias"))
        outcome.biases.add(parameter.spec, parameter.value);
    }
  }
}

std::unique_ptr<Outcome> outcome_of(const Setting& run, const Layout& layout = alone()) {
  auto outcome = std::make_unique<Outcome>();
  models::run_ranks(layout.ranks, {},
                    [&](models::World& world) { run_rank(run, layout, world, *outcome); });
  return outcome;
}

void expect_same(const Outcome& got, const Outcome& expected) {
  EXPECT_EQ(support::first_difference(got.moments, expected.moments, 2e-5), "");
  EXPECT_EQ(support::first_difference(got.biases, expected.biases, 0), "");
  ASSERT_EQ(got.metrics.size(), expected.metrics.size());
  for (const auto& [name, value] : expected.metrics)
    EXPECT_NEAR(got.metrics.at(name), value, 1e-5 * std::abs(value)) << name;
}

const LoadBalancingConfig kAllLosses{.aux_loss_coeff = 0.3,
                                     .seq_aux_loss_coeff = 0.2,
                                     .global_aux_loss_coeff = 0.5,
                                     .z_loss_coeff = 0.1};

TEST(LoadBalancing, IsTheSameOnEveryMeshAndRecomputedOrNot) {
  for (const std::string family : {"qwen3_moe", "deepseek_v3"}) {
    Setting run{.config = config_of(family), .balancing = kAllLosses};
    run.balancing.bias_update_rate = 0.125;
    const auto expected = outcome_of(run);
    EXPECT_EQ(expected->metrics.at("moe/dropped"), 0);
    EXPECT_GT(expected->metrics.at("moe/load_max"), 1);
    EXPECT_LT(expected->metrics.at("moe/load_min"), 1);
    for (const auto& layout : layouts()) {
      SCOPED_TRACE(family + " " + layout.name);
      expect_same(*outcome_of(run, layout), *expected);
    }
  }
}

// Sequences 0 and 2 are of the first rank, 1 and 3 of the other.
const Layout kDp2{"dp2 ep2", 2, {.expert_model_parallel_size = 2}};

TEST(LoadBalancing, DoesNotDependOnDataParallelRanksOfTheSameMicroBatches) {
  Setting run{.config = config_of("deepseek_v3"),
              .balancing = {.aux_loss_coeff = 0.3, .bias_update_rate = 0.1},
              .parts = {{0, 2}, {1, 3}}};
  const auto expected = outcome_of(run);
  run.parts = {{0, 1}};
  expect_same(*outcome_of(run, kDp2), *expected);
}

TEST(LoadBalancing, LossesOfSequencesAndLogitsDoNotDependOnTheCutIntoMicroBatches) {
  Setting run{.config = config_of("qwen3_moe"),
              .balancing = {.seq_aux_loss_coeff = 0.3, .z_loss_coeff = 0.2},
              .parts = {{0, 1, 2, 3}}};
  const auto expected = outcome_of(run);
  run.parts = {{3}, {1, 0}, {2}};
  expect_same(*outcome_of(run), *expected);
  run.parts = {{1}, {0}};
  expect_same(*outcome_of(run, kDp2), *expected);
}

TEST(LoadBalancing, GlobalLossSeesTheTokensOfAllDataParallelRanks) {
  Setting run{.config = config_of("qwen3_moe"),
              .balancing = {.global_aux_loss_coeff = 0.3},
              .parts = {{0, 1, 2, 3}}};
  const auto expected = outcome_of(run);
  run.parts = {{0, 1}};
  expect_same(*outcome_of(run, kDp2), *expected);
}

TEST(LoadBalancing, LossesChangeNoBitOfThePassThatTheyAreAddedTo) {
  Setting run{.config = config_of("qwen3_moe"), .balancing = kAllLosses};
  const auto with = outcome_of(run);
  run.balancing = {};
  const auto without = outcome_of(run);
  EXPECT_EQ(with->losses, without->losses);
  EXPECT_NE(support::first_difference(with->moments, without->moments, 1e-3), "");
}

TEST(LoadBalancing, CountingLoadsChangesNoBitOfTheGradients) {
  Setting run{.config = config_of("deepseek_v3")};
  const auto counted = outcome_of(run);
  run.balances = false;
  const auto plain = outcome_of(run);
  EXPECT_EQ(support::first_difference(counted->moments, plain->moments, 0), "");
  EXPECT_EQ(support::first_difference(counted->biases, plain->biases, 0), "");
}

TEST(LoadBalancing, BiasesStayWhereNothingWasLearned) {
  Setting run{.config = config_of("deepseek_v3"), .balancing = {.bias_update_rate = 0.1}};
  const auto moved = outcome_of(run);
  run.updates = false;
  const auto skipped = outcome_of(run);
  EXPECT_NE(support::first_difference(moved->biases, skipped->biases, 0), "");
  run.updates = true;
  run.forward_only = true;
  const auto evaluated = outcome_of(run);
  EXPECT_EQ(support::first_difference(evaluated->biases, skipped->biases, 0), "");
  EXPECT_TRUE(evaluated->metrics.empty());
}

TEST(LoadBalancing, MovesEachBiasAgainstItsLoad) {
  const auto bias = get_updated_expert_bias(at::tensor({6, 2, 4, 0}, at::kLong),
                                            at::tensor({0.5F, 0.5F, 0.5F, -1.0F}), 0.25);
  EXPECT_TRUE(at::equal(bias, at::tensor({0.25F, 0.75F, 0.25F, -0.75F})));
}

}  // namespace load_balancing_test
}  // namespace ferry::trainer
