#include "trainer/engine/router_replay.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/support/expect.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/models/trainee.h"
#include "tests/support/temp_dir.h"
#include "trainer/engine/micro_batches.h"
#include "trainer/engine/run_options.h"
#include "trainer/ppo/ppo_batch.h"
#include "trainer/update/compute_log_prob.h"
#include "trainer/update/update_actor.h"
#include "trainer/workers/actor_rollout_ref_worker.h"
#include "trainer/workers/batch_rows.h"

namespace ferry::trainer {
namespace router_replay_test {

using models::ParallelConfig;
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
  selective.recompute = {.granularity = models::Recompute::Granularity::kSelective,
                         .modules = {.moe = true}};
  return {{"alone", 1, {}, plain},
          {"tp2", 2, {.tensor_model_parallel_size = 2}, plain},
          {"tp2 sp ep2",
           2,
           {.tensor_model_parallel_size = 2,
            .expert_model_parallel_size = 2,
            .expert_tensor_parallel_size = 1},
           sequence},
          {"pp2, recomputed", 2, {.pipeline_model_parallel_size = 2}, full},
          {"cp2, experts recomputed", 2, {.context_parallel_size = 2}, selective}};
}

std::vector<ActorSample> make_samples(const std::vector<std::int64_t>& lengths,
                                      std::int64_t vocab) {
  std::vector<ActorSample> samples;
  for (auto& tokens : support::random_sequences(lengths, vocab, 1)) {
    ActorSample sample{.tokens = tokens,
                       .num_prompt_tokens = 1 + static_cast<std::int64_t>(samples.size()) % 3};
    sample.advantages =
        at::full({sample.num_response_tokens()}, samples.size() % 2 == 0 ? 1.0 : -0.7);
    samples.push_back(sample);
  }
  return samples;
}

// In kBitwise routes are the same anyway: on every mesh, and with them every byte of an update.
// Where packs are filled up, and at ends of answers, which a rollout does not compute, routers
// choose.
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
        auto samples = make_samples({9, 20, 5, 33, 11, 16}, config.vocab_size);
        const auto parts = split_micro_batches(samples.size(), 2);
        std::vector<at::Tensor> routes;
        const auto old =
            compute_log_prob(chooses.pipeline(), answered_prompts(samples), parts, 1, &routes);
        ASSERT_EQ(routes.size(), samples.size());
        const auto again =
            compute_log_prob(replays.pipeline(), answered_prompts(samples), parts, 1, &routes);
        for (std::size_t i = 0; i < samples.size(); ++i) {
          EXPECT_EQ(routes[i].sizes(),
                    (std::vector<std::int64_t>{samples[i].tokens.size(0), config.num_layers - dense,
                                               config.moe_router_topk}));
          EXPECT_EQ(routes[i].scalar_type(), at::kByte);
          EXPECT_TRUE(at::equal(again[i].log_probs, old[i].log_probs)) << i;
          samples[i].old_log_prob = old[i].log_probs - 0.1;
        }
        if (world.size() == 1) expected = routes;
        for (std::size_t i = 0; i < samples.size(); ++i)
          EXPECT_TRUE(at::equal(routes[i], expected[i])) << i;
        const auto free = update_actor(chooses.pipeline(), samples, parts, {});
        for (std::size_t i = 0; i < samples.size(); ++i) {
          samples[i].routed_experts = routes[i].to(at::kShort);
          samples[i].routed_experts[-1].fill_(-1);
        }
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
      auto samples = make_samples({8, 20, 4, 32}, config.vocab_size);  // no pack is filled up
      const auto parts = split_micro_batches(samples.size(), 2);
      std::vector<at::Tensor> routes;
      for (auto& sample : samples) {
        sample.routed_experts = at::tensor({0, 1}, at::kByte)
                                    .expand({sample.tokens.size(0), config.num_layers, 2})
                                    .contiguous();
        routes.push_back(sample.routed_experts);
      }
      const auto before =
          compute_log_prob(actor.pipeline(), answered_prompts(samples), parts, 1, &routes);
      for (auto* const chunk : actor.pointers) {
        for (const auto& parameter : chunk->parameters().all()) {
          const auto& key = parameter.spec.key;
          if (key.find("experts.experts.2.") != std::string::npos ||
              key.find("experts.experts.3.") != std::string::npos)
            parameter.value.fill_(std::numeric_limits<double>::quiet_NaN());
        }
      }
      const auto chosen = compute_log_prob(actor.pipeline(), answered_prompts(samples), parts);
      EXPECT_TRUE(chosen[3].log_probs.isnan().any().item<bool>()) << "routers choose other experts";
      const auto after =
          compute_log_prob(actor.pipeline(), answered_prompts(samples), parts, 1, &routes);
      for (std::size_t i = 0; i < samples.size(); ++i) {
        EXPECT_TRUE(at::equal(after[i].log_probs, before[i].log_probs)) << i;
        samples[i].old_log_prob = after[i].log_probs;
      }
      const auto metrics = update_actor(actor.pipeline(), samples, parts, {});
      EXPECT_NEAR(metrics.at("actor/ppo_kl"), 0, 1e-5);
      const auto norm = actor.optimizer->step({.lr = 1e-2}).grad_norm;
      EXPECT_TRUE(norm > 0 && std::isfinite(norm)) << norm;
    });
  }
}

// A token that nothing follows: no answer's token is drawn behind it, and none sees it.
TEST(RouterReplay, WhereTheLastTokenGoesIsOfNoConsequence) {
  auto config = support::tiny_config({.family = "qwen3_moe"});
  config.moe_router_topk = 2;
  models::World world({});
  const models::ModelOptions options{.alignment = models::Alignment::kBitwise,
                                     .dtype = distckpt::DType::kF32};
  const Trainee actor(world, {}, config, options, "actor");
  const Trainee other(world, {}, config, options, "other");
  auto samples = make_samples({9, 20, 5}, config.vocab_size);
  const auto parts = split_micro_batches(samples.size(), 2);
  std::vector<at::Tensor> routes;
  const auto old = compute_log_prob(actor.pipeline(), answered_prompts(samples), parts, 1, &routes);
  for (std::size_t i = 0; i < samples.size(); ++i) {
    samples[i].old_log_prob = old[i].log_probs - 0.1;
    samples[i].routed_experts = routes[i];
  }
  const auto there = update_actor(actor.pipeline(), samples, parts, {});
  for (auto& one : routes) one[-1] = config.num_moe_experts - 1 - one[-1];
  const auto elsewhere =
      compute_log_prob(other.pipeline(), answered_prompts(samples), parts, 1, &routes);
  for (std::size_t i = 0; i < samples.size(); ++i) {
    EXPECT_TRUE(at::equal(elsewhere[i].log_probs, old[i].log_probs)) << i;
    samples[i].routed_experts = routes[i];
  }
  EXPECT_EQ(update_actor(other.pipeline(), samples, parts, {}), there);
}

// The loop relies on this: routes come with the answers, and both passes of the actor send tokens
// to the experts of these routes, whatever its own routers would choose.
TEST(RouterReplay, TheRolloutsRoutesAreReplayedByAllPassesOfTheActor) {
  const support::TempDir dir;
  support::write_tiny_model({.family = "mixtral", .head_dim = 16, .hidden = 64}, dir / "lm", 1);
  const auto config = load_ppo_config(
      "grpo", {},
      {"actor_rollout_ref.model.path=\"" + (dir / "lm").string() + "\"",
       "data.train_files=[\"none\"]", "data.max_prompt_length=8", "data.max_response_length=6",
       "actor_rollout_ref.actor.ppo_mini_batch_size=1",
       "actor_rollout_ref.actor.megatron.alignment=bitwise",
       "actor_rollout_ref.actor.megatron.dtype=float32",
       "actor_rollout_ref.actor.router_replay.mode=R3", "actor_rollout_ref.rollout.n=2",
       "actor_rollout_ref.rollout.kv_cache_bytes=1048576",
       "actor_rollout_ref.rollout.ignore_eos=true"});
  const auto origin = open_checkpoint(config.model);
  const auto experts = origin->map.config.num_moe_experts;
  models::World world({});
  ActorRolloutRefWorker worker(world, config, origin, 1);
  worker.init_rollout({});
  DataProto call;
  call.meta_info["weights_step"] = 0;
  (void)worker.update_weights(call);
  auto prompts =
      prompt_columns(std::vector<std::vector<std::int64_t>>{{1, 2, 3}, {4, 5, 6, 7, 8}}, 8);
  prompts.set("seeds", at::tensor({1, 2}, at::kLong));
  prompts.meta_info = {
      {"temperature", 1.0}, {"top_k", -1}, {"top_p", 1.0}, {"routed_experts", true}};
  auto batch = with_answers(prompts, worker.generate_sequences(prompts));
  (void)worker.sleep_rollout({});
  batch.meta_info = {{"temperature", 1.0}, {"global_step", 1}};

  const auto routes = batch.tensor("routed_experts");
  ASSERT_EQ(routes.sizes(), (std::vector<std::int64_t>{2, 8 + 6, 2, 2}));
  EXPECT_EQ(routes.scalar_type(), at::kByte);
  const auto is_token = batch.tensor("attention_mask").to(at::kBool).clone();
  is_token.select(1, 8 + 6 - 1).fill_(false);  // the answers' last ones are not computed
  EXPECT_EQ(routes.masked_fill(is_token.unsqueeze(-1).unsqueeze(-1), 0).sum().item<std::int64_t>(),
            0);

  const auto chosen = worker.compute_log_prob(
      batch.select(std::vector<std::string>{"prompts", "responses", "attention_mask"}));
  const auto replayed = worker.compute_log_prob(batch);
  EXPECT_FALSE(replayed.batch().contains("routed_experts"));
  EXPECT_TRUE(at::equal(replayed.tensor("old_log_probs"), chosen.tensor("old_log_probs")));
  batch.set("routed_experts", (experts - 1 - routes).to(at::kByte));
  const auto elsewhere = worker.compute_log_prob(batch);
  EXPECT_FALSE(at::equal(elsewhere.tensor("old_log_probs"), chosen.tensor("old_log_probs")));
  batch = batch.union_with(elsewhere);
  batch.set("advantages", at::ones({2, 6}));
  const auto answer = worker.update_actor(batch);
  EXPECT_EQ(answer.meta_info.at("metrics").at("actor/ppo_kl").get<double>(), 0) << answer.meta_info;
}

TEST(RouterReplay, RefusesModelsWithoutExpertsAndRoutesOfOthers) {
  models::World world({});
  const auto dense = support::tiny_config({});
  const Trainee actor(world, {}, dense, {.dtype = distckpt::DType::kF32});
  const std::vector<AnsweredPrompt> prompts{
      {.tokens = support::random_sequences({6}, dense.vocab_size, 1).front(),
       .num_prompt_tokens = 1}};
  std::vector<at::Tensor> routes;
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"router_replay", "no experts"}, [&] {
    compute_log_prob(actor.pipeline(), prompts, {{0}}, 1, &routes);
  }));
  routes = {at::zeros({6, 2, 2}, at::kByte)};
  EXPECT_TRUE(
      support::fails(ErrorKind::kUsage, {"routed_experts: 2 layers of 2 choices", "0 layers"},
                     [&] { compute_log_prob(actor.pipeline(), prompts, {{0}}, 1, &routes); }));
}

}  // namespace router_replay_test
}  // namespace ferry::trainer
