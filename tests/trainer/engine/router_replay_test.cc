#include "trainer/engine/router_replay.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/models/rollout_rows.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/models/trainee.h"
#include "tests/support/temp_dir.h"
#include "trainer/engine/micro_batches.h"
#include "trainer/engine/run_options.h"
#include "trainer/update/compute_log_prob.h"
#include "trainer/update/update_actor.h"
#include "trainer/workers/actor_rollout_ref_worker.h"

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

RolloutBatch make_rows(const std::vector<std::int64_t>& lengths, std::int64_t vocab) {
  std::vector<std::int64_t> prompts;
  for (std::size_t row = 0; row < lengths.size(); ++row)
    prompts.push_back(1 + static_cast<std::int64_t>(row) % 3);
  auto batch = support::rollout_rows(support::random_sequences(lengths, vocab, 1), prompts);
  batch.advantages = support::alternating_advantages(batch);
  return batch;
}

// The last token of each row, by its place in the batch.
at::Tensor last_tokens(const RolloutBatch& batch) {
  return at::tensor(std::vector(batch.offsets.begin() + 1, batch.offsets.end()), at::kLong) - 1;
}

// In kBitwise routes are the same anyway: on every mesh, and with them every byte of an update.
// Routers choose where packs are filled up, and at ends of answers, which a rollout does not
// compute.
TEST(RouterReplay, ChangesNoByteWhereTheWeightsAreTheSame) {
  for (const std::string family : {"qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3"}) {
    const int dense = family == "deepseek_v3" ? 1 : 0;
    auto config = support::tiny_config({.family = family, .experts = 8, .dense_layers = dense});
    config.moe_router_topk = 2;
    if (family.starts_with("deepseek")) {
      config.moe_router_num_groups = 4;
      config.moe_router_group_topk = 2;
    }
    at::Tensor expected;
    for (const auto& layout : layouts(models::Alignment::kBitwise)) {
      SCOPED_TRACE(fmt::format("{} {}", family, layout.name));
      models::run_ranks(layout.ranks, {}, [&](models::World& world) {
        const Trainee chooses(world, layout.parallel, config, layout.options, "chooses");
        const Trainee replays(world, layout.parallel, config, layout.options, "replays");
        auto batch = make_rows({9, 20, 5, 33, 11, 16}, config.vocab_size);
        const auto parts = split_micro_batches(6, 2);
        const auto old = compute_log_prob(chooses.pipeline(), batch, parts, 1, true);
        const auto& routes = old.routed_experts;
        EXPECT_EQ(routes.sizes(),
                  (std::vector<std::int64_t>{batch.offsets.back(), config.num_layers - dense,
                                             config.moe_router_topk}));
        EXPECT_EQ(routes.scalar_type(), at::kByte);
        batch.routed_experts = routes;
        const auto again = compute_log_prob(replays.pipeline(), batch, parts);
        EXPECT_TRUE(at::equal(again.log_probs, old.log_probs));
        batch.old_log_probs = old.log_probs - 0.1;
        if (world.size() == 1) expected = routes;
        EXPECT_TRUE(at::equal(routes, expected));
        batch.routed_experts = at::Tensor();
        const auto free = update_actor(chooses.pipeline(), batch, parts, {});
        batch.routed_experts = routes.to(at::kShort);
        batch.routed_experts.index_fill_(0, last_tokens(batch), -1);
        EXPECT_EQ(update_actor(replays.pipeline(), batch, parts, {}), free);
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
      auto batch = make_rows({8, 20, 4, 32}, config.vocab_size);  // no pack is filled up
      const auto parts = split_micro_batches(4, 2);
      const auto routes = at::tensor({0, 1}, at::kByte)
                              .expand({batch.offsets.back(), config.num_layers, 2})
                              .contiguous();
      batch.routed_experts = routes;
      const auto before = compute_log_prob(actor.pipeline(), batch, parts).log_probs;
      for (auto* const chunk : actor.pointers) {
        for (const auto& parameter : chunk->parameters().all()) {
          const auto& key = parameter.spec.key;
          if (key.find("experts.experts.2.") != std::string::npos ||
              key.find("experts.experts.3.") != std::string::npos)
            parameter.value.fill_(std::numeric_limits<double>::quiet_NaN());
        }
      }
      batch.routed_experts = at::Tensor();
      const auto chosen = compute_log_prob(actor.pipeline(), batch, parts).log_probs;
      EXPECT_TRUE(batch.response_of(chosen, 3).isnan().any().item<bool>())
          << "routers choose other experts";
      batch.routed_experts = routes;
      batch.old_log_probs = compute_log_prob(actor.pipeline(), batch, parts).log_probs;
      EXPECT_TRUE(at::equal(batch.old_log_probs, before));
      const auto metrics = update_actor(actor.pipeline(), batch, parts, {});
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
  auto batch = make_rows({9, 20, 5}, config.vocab_size);
  const auto parts = split_micro_batches(3, 2);
  const auto old = compute_log_prob(actor.pipeline(), batch, parts, 1, true);
  batch.old_log_probs = old.log_probs - 0.1;
  batch.routed_experts = old.routed_experts;
  const auto there = update_actor(actor.pipeline(), batch, parts, {});
  const auto last = last_tokens(batch);
  batch.routed_experts = old.routed_experts.index_copy(
      0, last, config.num_moe_experts - 1 - old.routed_experts.index_select(0, last));
  const auto elsewhere = compute_log_prob(other.pipeline(), batch, parts);
  EXPECT_TRUE(at::equal(elsewhere.log_probs, old.log_probs));
  EXPECT_EQ(update_actor(other.pipeline(), batch, parts, {}), there);
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
  distckpt::write_text(dir / "tokenizer.json",
                       R"({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}})");
  const PromptEncoder encoder(dir.path(), config.data);
  worker.init_rollout(encoder);
  worker.update_weights(0);
  auto batch = RolloutBatch::of(std::vector<RolloutBatch::Tokens>{{1, 2, 3}, {4, 5, 6, 7, 8}});
  batch.max_prompt_length = 8;
  batch.max_response_length = 6;
  batch.seeds = at::tensor({1, 2}, at::kLong);
  batch.take(worker.generate_sequences(batch, {.routed_experts = true}));
  worker.sleep_rollout();

  const auto routes = batch.routed_experts;
  ASSERT_EQ(routes.sizes(), (std::vector<std::int64_t>{3 + 6 + 5 + 6, 2, 2}));
  EXPECT_EQ(routes.scalar_type(), at::kByte);
  // The last tokens of responses are not computed.
  EXPECT_EQ(routes.index_select(0, last_tokens(batch)).sum().item<std::int64_t>(), 0);

  const auto chosen = worker.compute_log_prob(batch.only({}));
  const auto replayed = worker.compute_log_prob(batch);
  EXPECT_FALSE(replayed.routed_experts.defined());
  EXPECT_TRUE(at::equal(replayed.old_log_probs, chosen.old_log_probs));
  batch.routed_experts = (experts - 1 - routes).to(at::kByte);
  batch.take(worker.compute_log_prob(batch));
  EXPECT_FALSE(at::equal(batch.old_log_probs, chosen.old_log_probs));
  batch.advantages = at::ones({12});
  EXPECT_EQ(worker.update_actor(batch, 1).metrics.at("actor/ppo_kl"), 0);
}

TEST(RouterReplay, RefusesModelsWithoutExpertsAndRoutesOfOthers) {
  models::World world({});
  const auto dense = support::tiny_config({});
  const Trainee actor(world, {}, dense, {.dtype = distckpt::DType::kF32});
  auto batch = support::rollout_rows(support::random_sequences({6}, dense.vocab_size, 1), {1});
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"router_replay", "no experts"},
                             [&] { compute_log_prob(actor.pipeline(), batch, {{0}}, 1, true); }));
  batch.routed_experts = at::zeros({6, 2, 2}, at::kByte);
  EXPECT_TRUE(support::fails(ErrorKind::kUsage,
                             {"routed_experts: 2 layers of 2 choices", "0 layers"},
                             [&] { compute_log_prob(actor.pipeline(), batch, {{0}}); }));
}

}  // namespace router_replay_test
}  // namespace ferry::trainer
