#include "trainer/router_replay.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/support/expect.h"
#include "tests/support/trainee.h"
#include "trainer/compute_log_prob.h"
#include "trainer/micro_batches.h"
#include "trainer/update_actor.h"

namespace ferry::trainer {
namespace {

using distckpt::ParallelConfig;
using support::Trainee;

struct Layout {
  const char* name;
  int ranks;
  ParallelConfig parallel;
  models::ModelOptions options{};
};

std::vector<Layout> layouts(models::Alignment alignment) {
  const models::ModelOptions plain{.alignment = alignment, .dtype = distckpt::DType::kF32};
  auto sequence = plain;
  sequence.sequence_parallel = true;
  auto full = plain;
  full.recompute.granularity = models::Recompute::Granularity::kFull;
  auto selective = plain;
  selective.recompute = {.granularity = models::Recompute::Granularity::kSelective, .modules = {.moe = true}};
  return {{"alone", 1, {}, plain},
          {"tp2", 2, {.tensor_model_parallel_size = 2}, plain},
          {"tp2 sp ep2", 2, {.tensor_model_parallel_size = 2, .expert_model_parallel_size = 2, .expert_tensor_parallel_size = 1}, sequence},
          {"pp2, recomputed", 2, {.pipeline_model_parallel_size = 2}, full},
          {"cp2, experts recomputed", 2, {.context_parallel_size = 2}, selective}};
}

std::vector<ActorSample> make_samples(const std::vector<std::int64_t>& lengths, std::int64_t vocab) {
  std::vector<ActorSample> samples;
  for (auto& tokens : support::random_sequences(lengths, vocab, 1)) {
    ActorSample sample{.tokens = tokens, .num_prompt_tokens = 1 + static_cast<std::int64_t>(samples.size()) % 3};
    sample.advantages = at::full({sample.num_response_tokens()}, samples.size() % 2 == 0 ? 1.0 : -0.7);
    samples.push_back(sample);
  }
  return samples;
}

std::vector<at::Tensor> tokens_of(const std::vector<ActorSample>& samples) {
  std::vector<at::Tensor> tokens;
  for (const auto& sample : samples) tokens.push_back(sample.tokens);
  return tokens;
}

// In kBitwise routes are the same anyway: on every mesh, and with them every byte of an update. No
// pack is filled up here.
TEST(RouterReplay, ChangesNoByteWhereTheWeightsAreTheSame) {
  for (const std::string family : {"qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3"}) {
    const int dense = family == "deepseek_v3" ? 1 : 0;
    auto config = support::tiny_config({.family = family, .experts = 8, .dense_layers = dense});
    config.moe_router_topk = 2;
    if (family.starts_with("deepseek")) {
      config.moe_router_num_groups = 4;
      config.moe_router_group_topk = 2;
    }
    std::vector<at::Tensor> expected;
    for (const auto& layout : layouts(models::Alignment::kBitwise)) {
      SCOPED_TRACE(fmt::format("{} {}", family, layout.name));
      models::run_ranks(layout.ranks, {}, [&](models::World& world) {
        const Trainee chooses(world, layout.parallel, config, layout.options, "chooses");
        const Trainee replays(world, layout.parallel, config, layout.options, "replays");
        auto samples = make_samples({8, 20, 4, 32, 12, 16}, config.vocab_size);
        const auto parts = split_micro_batches(samples.size(), 2);
        std::vector<at::Tensor> routes;
        const auto old = compute_log_prob(chooses.pipeline(), tokens_of(samples), parts, 1, &routes);
        ASSERT_EQ(routes.size(), samples.size());
        const auto again = compute_log_prob(replays.pipeline(), tokens_of(samples), parts, 1, &routes);
        for (std::size_t i = 0; i < samples.size(); ++i) {
          EXPECT_EQ(routes[i].sizes(), (std::vector<std::int64_t>{samples[i].tokens.size(0), config.num_layers - dense, config.moe_router_topk}));
          EXPECT_EQ(routes[i].scalar_type(), at::kByte);
          EXPECT_TRUE(at::equal(again[i].log_probs, old[i].log_probs)) << i;
          samples[i].old_log_prob = old[i].log_probs.narrow(0, samples[i].num_prompt_tokens - 1, samples[i].num_response_tokens()).clone() - 0.1;
        }
        if (world.size() == 1) expected = routes;
        for (std::size_t i = 0; i < samples.size(); ++i) EXPECT_TRUE(at::equal(routes[i], expected[i])) << i;
        const auto free = update_actor(chooses.pipeline(), samples, parts, {});
        for (std::size_t i = 0; i < samples.size(); ++i) samples[i].routed_experts = routes[i];
        EXPECT_EQ(update_actor(replays.pipeline(), samples, parts, {}), free);
        const auto norm = chooses.optimizer->step({.lr = 1e-2}).grad_norm;
        EXPECT_GT(norm, 0);
        EXPECT_EQ(replays.optimizer->step({.lr = 1e-2}).grad_norm, norm);
      });
    }
  }
}

// Experts that no token went to may hold anything: neither answers nor gradients know of them.
TEST(RouterReplay, SendsTokensWhereTheyWentWhateverTheRouterChooses) {
  auto config = support::tiny_config({.family = "qwen3_moe"});
  config.moe_router_topk = 2;
  for (const auto& layout : layouts(models::Alignment::kFast)) {
    SCOPED_TRACE(layout.name);
    models::run_ranks(layout.ranks, {}, [&](models::World& world) {
      const Trainee actor(world, layout.parallel, config, layout.options);
      auto samples = make_samples({9, 20, 5, 33}, config.vocab_size);  // packs are filled up
      const auto parts = split_micro_batches(samples.size(), 2);
      std::vector<at::Tensor> routes;
      for (auto& sample : samples) {
        sample.routed_experts = at::tensor({0, 1}, at::kByte).expand({sample.tokens.size(0), config.num_layers, 2}).contiguous();
        routes.push_back(sample.routed_experts);
      }
      const auto before = compute_log_prob(actor.pipeline(), tokens_of(samples), parts, 1, &routes);
      for (auto* const chunk : actor.pointers) {
        for (const auto& parameter : chunk->parameters().all()) {
          const auto& key = parameter.spec.key;
          if (key.find("experts.experts.2.") != std::string::npos || key.find("experts.experts.3.") != std::string::npos)
            parameter.value.fill_(std::numeric_limits<double>::quiet_NaN());
        }
      }
      const auto chosen = compute_log_prob(actor.pipeline(), tokens_of(samples), parts);
      EXPECT_TRUE(chosen[3].log_probs.isnan().any().item<bool>()) << "routers choose other experts";
      const auto after = compute_log_prob(actor.pipeline(), tokens_of(samples), parts, 1, &routes);
      for (std::size_t i = 0; i < samples.size(); ++i) {
        EXPECT_TRUE(at::equal(after[i].log_probs, before[i].log_probs)) << i;
        samples[i].old_log_prob = after[i].log_probs.narrow(0, samples[i].num_prompt_tokens - 1, samples[i].num_response_tokens()).clone();
      }
      const auto metrics = update_actor(actor.pipeline(), samples, parts, {});
      EXPECT_NEAR(metrics.at("actor/ppo_kl"), 0, 1e-5);
      const auto norm = actor.optimizer->step({.lr = 1e-2}).grad_norm;
      EXPECT_TRUE(norm > 0 && std::isfinite(norm)) << norm;
    });
  }
}

TEST(RouterReplay, RefusesModelsWithoutExpertsAndRoutesOfOthers) {
  models::World world({});
  const auto dense = support::tiny_config({});
  const Trainee actor(world, {}, dense, {.dtype = distckpt::DType::kF32});
  const auto sequences = support::random_sequences({6}, dense.vocab_size, 1);
  std::vector<at::Tensor> routes;
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"router_replay", "no experts"}, [&] { compute_log_prob(actor.pipeline(), sequences, {{0}}, 1, &routes); }));
  routes = {at::zeros({6, 2, 2}, at::kByte)};
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"routed_experts: 2 layers of 2 choices", "0 layers"}, [&] { compute_log_prob(actor.pipeline(), sequences, {{0}}, 1, &routes); }));
}

}  // namespace
}  // namespace ferry::trainer
