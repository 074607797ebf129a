// Claims that verl has no counterpart for: losses do not depend on the cut into micro-batches, and
// invalid input is refused. tests/interop/train/test_core_algos.py compares values with verl's.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "distckpt/base/error.h"
#include "tests/support/expect.h"
#include "trainer/algorithms/advantages.h"
#include "trainer/algorithms/masked.h"
#include "trainer/algorithms/overlong_penalty.h"
#include "trainer/algorithms/ppo_loss.h"
#include "trainer/algorithms/rollout_corr.h"

namespace ferry::trainer {
namespace algorithms_test {

template <typename Body>
void expect_error(Body&& body, ErrorKind kind, std::string_view fragment) {
  EXPECT_TRUE(support::fails(kind, {fragment}, body));
}

constexpr std::int64_t kSequences = 12, kLength = 9;

at::Tensor random(double scale) {
  return scale * at::randn({kSequences, kLength});
}

// Lengths differ; one sequence is cut out whole.
at::Tensor some_mask() {
  const auto lengths = at::randint(1, kLength + 1, {kSequences, 1});
  auto mask = (at::arange(kLength).unsqueeze(0) < lengths).to(at::kLong);
  mask[5].zero_();
  return mask;
}

ActorLossInputs some_inputs() {
  const auto old = -random(1).abs();
  return {.policy = {.old_log_prob = old,
                     .log_prob = old + random(0.3),
                     .advantages = random(2),
                     .response_mask = some_mask(),
                     .rollout_is_weights = random(0.3).exp()},
          .entropy = random(1).abs(),
          .ref_log_prob = old + random(0.1)};
}

ActorLossInputs part_of(const ActorLossInputs& in, std::int64_t begin, std::int64_t end) {
  const auto cut = [&](const at::Tensor& t) { return t.defined() ? t.slice(0, begin, end) : t; };
  const auto& p = in.policy;
  return {.policy = {.old_log_prob = cut(p.old_log_prob),
                     .log_prob = cut(p.log_prob),
                     .advantages = cut(p.advantages),
                     .response_mask = cut(p.response_mask),
                     .rollout_is_weights = cut(p.rollout_is_weights),
                     .cov_tokens = cut(p.cov_tokens)},
          .entropy = cut(in.entropy),
          .ref_log_prob = cut(in.ref_log_prob)};
}

struct Sum {
  at::Tensor loss{};
  LossMetrics metrics{};
  at::Tensor gradient{};  // of log_prob
};

// In micro-batches of so many sequences.
Sum in_parts(ActorLossInputs in, const ActorLossConfig& config, std::int64_t size) {
  in.policy.log_prob = in.policy.log_prob.detach().clone().requires_grad_();
  const GlobalBatchInfo info{.batch_num_tokens = in.policy.response_mask.sum().item<std::int64_t>(),
                             .global_batch_size = kSequences,
                             .loss_scale_factor = kLength};
  Sum sum{.loss = at::zeros({})};
  for (std::int64_t i = 0; i < kSequences; i += size) {
    const auto part = ppo_loss(part_of(in, i, std::min(i + size, kSequences)), config, info);
    part.loss.backward();
    sum.loss += part.loss.detach();
    for (const auto& [name, value] : part.metrics) {
      auto& total = sum.metrics.try_emplace(name, at::zeros({})).first->second;
      total = total + value;
    }
  }
  sum.gradient = in.policy.log_prob.grad();
  return sum;
}

void expect_near(const at::Tensor& left, const at::Tensor& right, const std::string& what) {
  EXPECT_TRUE(at::allclose(left, right, 1e-5, 1e-6)) << what << ": " << left << " " << right;
}

class CutIntoMicroBatches : public testing::TestWithParam<std::tuple<std::string, std::string>> {};

TEST_P(CutIntoMicroBatches, ChangesNeitherLossNorMetricsNorGradient) {
  at::manual_seed(3);
  const auto [mode, aggregation] = GetParam();
  const ActorLossConfig config{
      .policy_loss = {.loss_mode = parse_choice<LossMode>("loss_mode", mode),
                      .loss_agg_mode = parse_choice<LossAggMode>("loss_agg_mode", aggregation),
                      .clip_cov_ratio = 0.1,
                      .clip_cov_lb = 0.1,
                      .kl_cov_ratio = 0.1},
      .entropy_coeff = 0.01,
      .use_kl_loss = true};
  auto in = some_inputs();
  if (needs_cov_tokens(config.policy_loss.loss_mode)) {
    in.policy.cov_tokens = select_cov_tokens(in.policy, config.policy_loss);
    EXPECT_GT(in.policy.cov_tokens.sum().item<std::int64_t>(), 2);
  }
  const auto whole = in_parts(in, config, kSequences);
  EXPECT_GT(whole.gradient.abs().max().item<double>(), 1e-4);
  for (const std::int64_t size : {1, 5}) {
    const auto parts = in_parts(in, config, size);
    expect_near(parts.loss, whole.loss, "loss");
    expect_near(parts.gradient, whole.gradient, "gradient");
    ASSERT_EQ(parts.metrics.size(), whole.metrics.size());
    for (const auto& [name, value] : whole.metrics)
      expect_near(parts.metrics.at(name), value, name);
  }
}

// The metrics compared are those that are not statistics of micro-batches.
TEST(BypassMode, LosesNothingToACutIntoMicroBatches) {
  at::manual_seed(4);
  auto in = some_inputs();
  in.policy.response_mask[5][0] = 1;
  in.policy.rollout_is_weights = at::Tensor();
  for (const auto loss_type : {BypassLoss::kPpoClip, BypassLoss::kReinforce}) {
    ActorLossConfig config;
    auto& correction = config.rollout_correction;
    correction.rollout_is = RolloutIs::kSequence;
    correction.rollout_rs = {{.of = RejectionOption::Of::kToken, .k = 1}};
    correction.rollout_rs_threshold = {{.lower = 0.7, .upper = 1.4}};
    correction.bypass_mode = true;
    correction.loss_type = loss_type;
    const auto whole = in_parts(in, config, kSequences);
    EXPECT_GT(whole.metrics.at("rollout_corr/rollout_rs_masked_fraction").item<double>(), 0);
    for (const std::int64_t size : {1, 5}) {
      const auto parts = in_parts(in, config, size);
      expect_near(parts.loss, whole.loss, "loss");
      expect_near(parts.gradient, whole.gradient, "gradient");
      for (const char* name : {"actor/pg_loss", "rollout_corr/kl", "rollout_corr/rollout_is_mean",
                               "rollout_corr/rollout_rs_masked_fraction"})
        expect_near(parts.metrics.at(name), whole.metrics.at(name), name);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    OfAllLosses,
    CutIntoMicroBatches,
    testing::Combine(
        testing::Values(
            "vanilla", "gspo", "cispo", "clip_cov", "kl_cov", "geo_mean", "sapo", "gpg"),
        testing::Values("token-mean",
                        "token-sum",
                        "seq-mean-token-sum",
                        "seq-mean-token-mean",
                        "seq-mean-token-sum-norm")),
    [](const auto& parameter) {
      auto name = std::get<0>(parameter.param) + "_" + std::get<1>(parameter.param);
      std::ranges::replace(name, '-', '_');
      return name;
    });

TEST(ValueLoss, IsTheSameInMicroBatches) {
  at::manual_seed(4);
  const auto values = random(1);
  const CriticLossInputs in{.vpreds = values + random(1),
                            .values = values,
                            .returns = random(1),
                            .response_mask = some_mask()};
  const GlobalBatchInfo info{.batch_num_tokens = in.response_mask.sum().item<std::int64_t>()};
  const auto whole = value_loss(in, {}, info);
  auto sum = at::zeros({});
  for (std::int64_t i = 0; i < kSequences; ++i) {
    const auto cut = [&](const at::Tensor& t) { return t.slice(0, i, i + 1); };
    sum += value_loss({.vpreds = cut(in.vpreds),
                       .values = cut(in.values),
                       .returns = cut(in.returns),
                       .response_mask = cut(in.response_mask)},
                      {}, info)
               .loss;
  }
  expect_near(sum, whole.loss, "loss");
}

// The policy of one update per batch is the one that was sampled: ratios are 1, nothing is
// clipped, and the gradient is that of REINFORCE.
TEST(PolicyLoss, AtTheFirstUpdateIsThePolicyGradient) {
  at::manual_seed(5);
  auto in = some_inputs().policy;
  in.rollout_is_weights = at::Tensor();
  in.log_prob = in.old_log_prob.clone().requires_grad_();
  const GlobalBatchInfo info{.batch_num_tokens = in.response_mask.sum().item<std::int64_t>()};
  const auto [loss, metrics] = compute_policy_loss(in, {}, info);
  loss.backward();
  EXPECT_EQ(metrics.at("actor/ppo_kl").item<double>(), 0);
  EXPECT_EQ(metrics.at("actor/pg_clipfrac").item<double>(), 0);
  EXPECT_EQ(metrics.at("actor/pg_clipfrac_lower").item<double>(), 0);
  expect_near(in.log_prob.grad(),
              -in.advantages * in.response_mask / static_cast<double>(info.batch_num_tokens),
              "gradient");
}

TEST(Masked, ValuesThatTheMaskLacksMayBeAnything) {
  const auto nan = std::numeric_limits<double>::quiet_NaN();
  const auto values = at::tensor({1.0, nan, 3.0}), mask = at::tensor({1, 0, 1});
  EXPECT_EQ(masked_sum(values, mask).item<double>(), 4);
  EXPECT_EQ(masked_mean(values, mask).item<double>(), 2);
  EXPECT_EQ(masked_mean(values, at::zeros_like(mask)).item<double>(), 0);
  expect_error(
      [&] {
        masked_var(values, at::tensor({1, 0, 0}));
      },
      ErrorKind::kUsage, "whitening: a variance needs 2 tokens, there are 1");
}

TEST(Inputs, ThatAreMissingAreNamed) {
  at::manual_seed(6);
  const auto in = some_inputs().policy;
  const AdvantageInputs rewards{.token_level_rewards = random(1), .response_mask = some_mask()};
  expect_error([&] { compute_policy_loss(in, {}, {}); }, ErrorKind::kUsage,
               "loss: batch_num_tokens is 0, but the loss is divided by it");
  expect_error([&] { compute_policy_loss(in, {.clip_ratio_c = 1}, {.batch_num_tokens = 1}); },
               ErrorKind::kUsage, "policy_loss: clip_ratio_c 1 is not above 1");
  expect_error([&] { compute_advantage(rewards, {.adv_estimator = AdvantageEstimator::kGae}); },
               ErrorKind::kUsage, "advantages: gae needs values");
  expect_error([&] { compute_advantage(rewards, {.adv_estimator = AdvantageEstimator::kGrpo}); },
               ErrorKind::kUsage, "advantages: groups of 0 sequences are known, expected 12");
  const std::vector<std::int64_t> alone{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  expect_error(
      [&] {
        auto singles = rewards;
        singles.index = alone;
        compute_advantage(singles, {.adv_estimator = AdvantageEstimator::kGrpoPassk});
      },
      ErrorKind::kUsage, "advantages: grpo_passk needs at least 2 samples of each prompt");
}

TEST(OverlongPenalty, RefusesABufferThatIsNoPartOfTheResponse) {
  expect_error([] { overlong_penalty(1, 8, {.len = 0}); }, ErrorKind::kUsage,
               "overlong_buffer: len 0 is not positive");
  expect_error([] { overlong_penalty(1, 8, {.len = 9}); }, ErrorKind::kUsage,
               "overlong_buffer: len 9 is above max_resp_len 8");
}

}  // namespace algorithms_test
}  // namespace ferry::trainer
