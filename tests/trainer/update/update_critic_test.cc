#include "trainer/update/update_critic.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/expect.h"
#include "tests/support/layout.h"
#include "tests/support/models/rollout_rows.h"
#include "tests/support/models/trainee.h"
#include "trainer/engine/micro_batches.h"
#include "trainer/update/compute_values.h"

namespace ferry::trainer {
namespace update_critic_test {

using support::kLayouts;
using support::Layout;
using support::Trainee;
using Metrics = std::map<std::string, double>;

constexpr models::ModelOptions kBitwise{.alignment = models::Alignment::kBitwise,
                                        .dtype = distckpt::DType::kF32};

RolloutBatch make_rows(std::int64_t vocab) {
  return support::rollout_rows(support::random_sequences({9, 20, 4, 33, 12, 16, 7, 25}, vocab, 1),
                               {1, 2, 3, 1, 2, 3, 1, 2});
}

at::Tensor values_of(const Trainee& critic,
                     const RolloutBatch& batch,
                     const std::vector<Partition>& parts) {
  return batch.responses_of(compute_values(critic.pipeline(), batch.sequences(), parts));
}

// Sets old values that are off by up to one, and returns that follow from the tokens.
void set_targets(const Trainee& critic, RolloutBatch& batch, const std::vector<Partition>& parts) {
  const auto values = values_of(critic, batch, parts);
  std::vector<float> tokens;
  for (std::int64_t row = 0; row < batch.size(); ++row)
    for (const auto token : batch.response(row)) tokens.push_back(static_cast<float>(token));
  const auto responses = at::tensor(tokens);
  batch.values = values + (responses % 5 - 2) / 2;
  batch.returns = values + responses % 3 - 1.5;
}

struct Outcome {
  support::WholeTensors gradients{};  // clipped, a tenth: the first moments after one step
  Metrics metrics{};
};

std::unique_ptr<Outcome> update(const Layout& layout, std::size_t micro_batch, LossAggMode mode) {
  const auto config = support::tiny_config({.family = "qwen2", .num_layers = 4, .head = "Token"});
  auto outcome = std::make_unique<Outcome>();
  models::run_ranks(layout.ranks, {}, [&](models::World& world) {
    auto options = kBitwise;
    options.sequence_parallel = layout.sequence_parallel;
    const Trainee critic(world, layout.parallel, config, options);
    auto mine = support::mine(critic, make_rows(config.vocab_size));
    const auto parts = split_micro_batches(static_cast<std::size_t>(mine.size()), micro_batch);
    set_targets(critic, mine, parts);
    critic.optimizer->zero_grad();
    const auto metrics =
        update_critic(critic.pipeline(), mine, parts, {.loss = {.loss_agg_mode = mode}});
    critic.optimizer->step({.lr = 1e-3});
    for (const auto& shard : critic.optimizer->sharded_state_dict()) {
      if (shard.tensor.key.starts_with("optimizer.state.exp_avg.")) outcome->gradients.add(shard);
    }
    if (world.rank() == world.size() - 1) outcome->metrics = metrics;
  });
  return outcome;
}

TEST(UpdateCritic, DoesNotDependOnTheMeshNorOnTheMicroBatches) {
  for (const auto& [micro_batch, mode] :
       {std::pair(std::size_t{1}, LossAggMode::kTokenMean), {4, LossAggMode::kSeqMeanTokenMean}}) {
    const auto expected = update(kLayouts[0], 8, mode);
    EXPECT_EQ(expected->metrics.size(), 3U);
    EXPECT_GT(expected->metrics.at("critic/vf_loss"), 0);
    EXPECT_GT(expected->metrics.at("critic/vf_clipfrac"), 0);
    EXPECT_LT(expected->metrics.at("critic/vf_clipfrac"), 1);
    for (const auto* key :
         {"output_layer.weight", "output_layer.bias", "embedding.word_embeddings.weight"})
      EXPECT_GT(expected->gradients.all()
                    .at(std::string("optimizer.state.exp_avg.") + key)
                    .abs()
                    .max()
                    .item<float>(),
                0)
          << key;
    for (const auto& layout : kLayouts) {
      SCOPED_TRACE(fmt::format("{} {}", layout.name, micro_batch));
      const auto got = update(layout, micro_batch, mode);
      EXPECT_EQ(support::first_difference(got->gradients, expected->gradients, 1e-4), "");
      for (const auto& [name, value] : expected->metrics)
        EXPECT_NEAR(got->metrics.at(name), value, 1e-5 * std::abs(value)) << name;
    }
  }
}

// The return of a token is whether it is odd, which the token before it tells.
TEST(UpdateCritic, LearnsReturns) {
  auto config = support::tiny_config({.family = "llama",
                                      .num_layers = 2,
                                      .head_dim = 16,
                                      .hidden = 32,
                                      .ffn = 64,
                                      .vocab = 32,
                                      .head = "Token"});
  models::run_ranks(2, {}, [&](models::World& world) {
    const Trainee critic(world, {.pipeline_model_parallel_size = 2}, config, kBitwise);
    std::vector<at::Tensor> sequences, returns;
    for (std::int64_t i = 0; i < 8; ++i) {
      sequences.push_back(at::arange(i, i + 12, at::kLong));
      returns.push_back((sequences.back().narrow(0, 2, 10) % 2).to(at::kFloat));
    }
    auto batch = support::rollout_rows(sequences, std::vector<std::int64_t>(8, 2));
    batch.returns = at::cat(returns);
    const auto parts = split_micro_batches(sequences.size(), 4);
    double first = 0;
    double last = 0;
    for (int step = 0; step < 40; ++step) {
      batch.values = values_of(critic, batch, parts);
      critic.optimizer->zero_grad();
      const auto metrics = update_critic(critic.pipeline(), batch, parts, {});
      EXPECT_EQ(metrics.at("critic/vf_clipfrac"), 0) << "values are the critic's own";
      EXPECT_NEAR(metrics.at("critic/vpred_mean"), batch.values.mean().item<double>(), 1e-5);
      critic.optimizer->step({.lr = 1e-2});
      last = metrics.at("critic/vf_loss");
      if (step == 0) first = last;
    }
    EXPECT_GT(first, 0.1);
    EXPECT_LT(last, 0.01);
  });
}

TEST(UpdateCritic, RefusesWhatIsNoCriticAndASampleWithoutAnAnswer) {
  models::World alone({});
  const auto fails = [&](const char* head, const RolloutBatch& rows, std::string_view why) {
    const Trainee model(alone, {}, support::tiny_config({.head = head}), {});
    return support::fails(ErrorKind::kUsage, {why}, [&] {
      update_critic(model.pipeline(), rows,
                    split_micro_batches(static_cast<std::size_t>(rows.size()), 1), {});
    });
  };
  EXPECT_TRUE(fails("", make_rows(50), "has no values"));
  EXPECT_TRUE(fails("Token", support::rollout_rows(support::random_sequences({9}, 50, 1), {9}),
                    "9 of the prompt"));
}

}  // namespace update_critic_test
}  // namespace ferry::trainer
