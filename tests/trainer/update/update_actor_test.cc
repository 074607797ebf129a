#include "trainer/update/update_actor.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "rollout/llm_engine.h"
#include "tests/support/layout.h"
#include "tests/support/models/rollout_rows.h"
#include "tests/support/models/trainee.h"
#include "trainer/algorithms/advantages.h"
#include "trainer/engine/micro_batches.h"
#include "trainer/update/compute_log_prob.h"
#include "trainer/workers/hybrid_engine.h"

namespace ferry::trainer {
namespace update_actor_test {

using support::Trainee;

RolloutBatch make_rows(std::int64_t vocab) {
  auto batch = support::rollout_rows(
      support::random_sequences({9, 20, 4, 33, 12, 16, 7, 25}, vocab, 1), {1, 2, 3, 1, 2, 3, 1, 2});
  batch.advantages = support::alternating_advantages(batch);
  return batch;
}

void set_old_log_probs(const Trainee& actor,
                       RolloutBatch& batch,
                       const std::vector<Partition>& parts) {
  batch.old_log_probs = compute_log_prob(actor.pipeline(), batch, parts).log_probs;
}

// One update per batch: the policy is the one that answered, to the bit. Its gradient is the same
// for every mesh and cut, but for rounding.
TEST(UpdateActor, StartsFromARatioOfOneAndDoesNotDependOnTheMesh) {
  const auto config = support::tiny_config({.family = "qwen2", .num_layers = 4});
  double expected = 0;
  for (const auto& layout : support::kLayouts) {
    for (const std::size_t size : {1, 4}) {
      SCOPED_TRACE(fmt::format("{} {}", layout.name, size));
      models::run_ranks(layout.ranks, {}, [&](models::World& world) {
        const Trainee actor(world, layout.parallel, config,
                            {.alignment = models::Alignment::kBitwise,
                             .dtype = distckpt::DType::kF32,
                             .sequence_parallel = layout.sequence_parallel});
        auto mine = support::mine(actor, make_rows(config.vocab_size));
        const auto parts = split_micro_batches(static_cast<std::size_t>(mine.size()), size);
        set_old_log_probs(actor, mine, parts);
        actor.optimizer->zero_grad();
        const auto metrics =
            update_actor(actor.pipeline(), mine, parts, {.loss = {.entropy_coeff = 0.01}});
        EXPECT_EQ(metrics.at("actor/ppo_kl"), 0);
        EXPECT_EQ(metrics.at("actor/pg_clipfrac"), 0);
        const auto norm = actor.optimizer->step({.lr = 1e-3}).grad_norm;
        if (world.rank() == 0 && expected == 0) expected = norm;
        EXPECT_GT(norm, 0);
        if (world.rank() == 0) {
          EXPECT_NEAR(norm, expected, 1e-4 * expected);
        }
      });
    }
  }
}

// Answers that are rejected make the others weigh no more, where losses are means of sequences:
// half of them, with the other half rejected, have half of the gradient that they have alone. (verl
// divides by global_batch_size, the answers of a mini-batch.)
TEST(UpdateActor, DividesByTheAnswersThatAreRejectedToo) {
  const auto config = support::tiny_config({.family = "qwen2", .num_layers = 2});
  const std::vector<PolicyLossConfig> losses{
      {.loss_agg_mode = LossAggMode::kSeqMeanTokenSum},
      {.loss_mode = LossMode::kGspo, .loss_agg_mode = LossAggMode::kSeqMeanTokenMean},
      {.loss_mode = LossMode::kSapo},
      {.loss_mode = LossMode::kGeoMean}};
  for (const int dp : {1, 2, 4}) {
    SCOPED_TRACE(dp);
    models::run_ranks(dp, {}, [&](models::World& world) {
      const Trainee actor(
          world, {}, config,
          {.alignment = models::Alignment::kBitwise, .dtype = distckpt::DType::kF32});
      const auto norm_of = [&](bool alone, const PolicyLossConfig& loss) {
        auto all = make_rows(config.vocab_size);
        const auto rejected = all.advantages < 0;
        all.response_mask = rejected.logical_not();
        if (alone) all = all.select(std::vector<std::int64_t>{0, 2, 4, 6});
        auto mine = support::mine(actor, all);
        const auto parts = split_micro_batches(static_cast<std::size_t>(mine.size()), 1);
        set_old_log_probs(actor, mine, parts);
        actor.optimizer->zero_grad();
        (void)update_actor(actor.pipeline(), mine, parts, {.loss = {.policy_loss = loss}});
        return actor.optimizer->step({.lr = 0}).grad_norm;
      };
      for (const auto& loss : losses) {
        const auto alone = norm_of(true, loss);
        EXPECT_GT(alone, 0);
        EXPECT_NEAR(norm_of(false, loss), alone / 2, 1e-4 * alone);
      }
    });
  }
}

// A token that the mask lacks, in the middle of a response, teaches nothing: whatever its advantage
// and its old log-probability are, the update is the same.
TEST(UpdateActor, HolesOfTheMaskTeachNothing) {
  const auto config = support::tiny_config({.family = "qwen2", .num_layers = 2});
  models::World world({});
  std::map<std::string, double> expected;
  double norm = 0;
  for (const double anything : {0.0, 5.0, -3.0}) {
    const Trainee actor(world, {}, config,
                        {.alignment = models::Alignment::kBitwise, .dtype = distckpt::DType::kF32},
                        fmt::format("actor {}", anything));
    auto batch = make_rows(config.vocab_size);
    const auto parts = split_micro_batches(static_cast<std::size_t>(batch.size()), 4);
    set_old_log_probs(actor, batch, parts);
    const auto hole = at::arange(batch.response_offsets.back()) % 3 == 1;
    batch.response_mask = hole.logical_not();
    batch.advantages = batch.advantages.masked_fill(hole, anything);
    batch.old_log_probs = batch.old_log_probs + hole * anything;
    const auto metrics =
        update_actor(actor.pipeline(), batch, parts, {.loss = {.entropy_coeff = 0.01}});
    const auto of_this = actor.optimizer->step({.lr = 0}).grad_norm;
    if (expected.empty()) {
      expected = metrics;
      norm = of_this;
    }
    EXPECT_GT(of_this, 0);
    EXPECT_EQ(of_this, norm);
    EXPECT_EQ(metrics, expected);
  }
}

// Everything together on two ranks: answers drawn by the rollout on one mesh, rewarded for a token,
// make the actor on another one give that token.
TEST(UpdateActor, LearnsWhatIsRewarded) {
  constexpr std::int64_t kWanted = 7;
  constexpr std::int64_t kAnswer = 12;
  constexpr std::int64_t kSamples = 16;
  auto config = support::tiny_config(
      {.family = "llama", .num_layers = 2, .head_dim = 16, .hidden = 32, .ffn = 64, .vocab = 32});
  config.max_position_embeddings = 64;
  models::run_ranks(2, {}, [&](models::World& world) {
    const models::ModelOptions options{.alignment = models::Alignment::kBitwise,
                                       .dtype = distckpt::DType::kF32};
    const Trainee actor(world, {.pipeline_model_parallel_size = 2}, config, options);
    for (auto* const chunk : actor.pointers) {
      for (const auto& parameter : chunk->parameters().all()) {
        if (parameter.spec.shape.rank() > 1) parameter.value.mul_(0.1);
      }
    }
    actor.optimizer->reload_model_params();
    const models::ParallelState rollout_mesh(
        world, {.tensor_model_parallel_size = 2, .make_vocab_size_divisible_by = 2}, "rollout");
    const auto served = models::make_stage(config, rollout_mesh, options);
    rollout::LLMEngine engine(*served.front(), {.max_num_seqs = 16, .num_blocks = 32});
    HybridEngine hybrid(world, "hybrid", actor.pointers, nullptr, {served.front().get(), &engine},
                        {});
    double first = 0;
    double last = 0;
    for (int step = 0; step < 25; ++step) {
      hybrid.rollout_mode();
      engine.add_request(fmt::format("step {}", step), {1, 2, 3},
                         {.n = kSamples,
                          .temperature = 1,
                          .seed = static_cast<std::uint64_t>(step),
                          .ignore_eos = true,
                          .max_tokens = kAnswer});
      std::vector<std::vector<std::int64_t>> tokens(kSamples, {1, 2, 3});
      std::vector<std::vector<float>> logprobs(kSamples);
      while (engine.has_unfinished()) {
        for (const auto& output : engine.step()) {
          for (const auto& one : output.outputs) {
            for (const auto& token : one.tokens) {
              tokens[static_cast<std::size_t>(one.index)].push_back(token.token_id);
              logprobs[static_cast<std::size_t>(one.index)].push_back(token.logprob);
            }
          }
        }
      }
      hybrid.train_mode();
      auto rewards = at::zeros({kSamples, kAnswer});
      std::vector<RolloutBatch::Tokens> prompts, responses;
      for (std::int64_t i = 0; i < kSamples; ++i) {
        const auto& of_sample = tokens[static_cast<std::size_t>(i)];
        const auto all = at::tensor(of_sample, at::kLong);
        rewards[i][kAnswer - 1] = all.narrow(0, 3, kAnswer).eq(kWanted).to(at::kFloat).mean();
        prompts.emplace_back(of_sample.begin(), of_sample.begin() + 3);
        responses.emplace_back(of_sample.begin() + 3, of_sample.end());
      }
      auto batch = RolloutBatch::of(prompts, responses);
      const std::vector<std::int64_t> group(kSamples, 0);
      const auto advantages =
          compute_advantage({.token_level_rewards = rewards,
                             .response_mask = at::ones({kSamples, kAnswer}, at::kLong),
                             .index = group},
                            {.adv_estimator = AdvantageEstimator::kGrpo})
              .advantages;
      const auto parts = split_micro_batches(kSamples, 8);
      set_old_log_probs(actor, batch, parts);
      batch.advantages = batch.ragged(advantages);
      std::vector<float> of_rollout;
      for (const auto& one : logprobs) of_rollout.insert(of_rollout.end(), one.begin(), one.end());
      EXPECT_TRUE(at::equal(batch.old_log_probs, at::tensor(of_rollout)))
          << "the rollout's are other bytes";
      actor.optimizer->zero_grad();
      update_actor(actor.pipeline(), batch, parts, {});
      actor.optimizer->step({.lr = 1e-2});
      last = rewards.sum().item<double>() / kSamples;
      if (step == 0) first = last;
    }
    EXPECT_LT(first, 0.2);
    EXPECT_GT(last, 0.6);
  });
}

}  // namespace update_actor_test
}  // namespace ferry::trainer
