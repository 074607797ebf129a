#include "trainer/ppo/batch_worker.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "distckpt/base/json.h"
#include "tests/support/expect.h"
#include "tests/trainer/ppo/tiny_run.h"

namespace ferry::trainer {
namespace batch_worker_test {

using support::TinyRun;

// A group of two answers, "yes" of three tokens worth 1 and "no" of two worth 0.
RolloutBatch two_answers() {
  auto batch = RolloutBatch::of(std::vector<RolloutBatch::Tokens>{{'?'}, {'?'}},
                                std::vector<RolloutBatch::Tokens>{{'y', 'e', 's'}, {'n', 'o'}});
  batch.max_prompt_length = 16;
  batch.max_response_length = 6;
  batch.uid = {"group", "group"};
  batch.scores = at::tensor({1.F, 0.F});
  batch.ground_truth = {"y", "y"};
  batch.reward_extra_info = {{{"acc", 1.0}, {"score", 1.0}}, {{"acc", 0.0}, {"score", 0.0}}};
  batch.rollout_log_probs = at::full({5}, -1.F);
  batch.old_log_probs = at::full({5}, -1.F);
  batch.entropys = at::tensor({1.F, 2.F, 3.F, 4.F, 5.F});
  return batch;
}

std::vector<float> numbers(const at::Tensor& tensor) {
  const auto all = tensor.to(at::kFloat).contiguous();
  return {all.const_data_ptr<float>(), all.const_data_ptr<float>() + all.numel()};
}

// (score - mean) / (std + 1e-6) of the group's scores 1 and 0 is 1 / sqrt(2), to the tokens of
// either answer.
TEST(BatchWorker, AdvantagesCompareTheAnswersOfAGroup) {
  TinyRun run;
  KlController kl(run.config.algorithm.kl_ctrl);
  Metrics metrics;
  const auto answer = run.see(run.batch_worker.compute_advantages(two_answers(), kl, metrics));
  const auto found = numbers(answer.advantages);
  ASSERT_EQ(found.size(), 5U);
  for (std::size_t i = 0; i < 5; ++i)
    EXPECT_NEAR(found[i], i < 3 ? std::sqrt(0.5) : -std::sqrt(0.5), 1e-5) << i;
  EXPECT_EQ(numbers(answer.token_level_scores), (std::vector<float>{0, 0, 1, 0, 0}));
  EXPECT_EQ(answer.size(), 2);
  EXPECT_EQ(kl.value(), run.config.algorithm.kl_ctrl.kl_coef);
}

// The distance of 1 a token is ten times the target: the factor grows by the most of a step, 0.2
// for each of 2 sequences in a horizon of 10.
TEST(BatchWorker, ThePenaltyComesBackAdapted) {
  TinyRun run([](PpoConfig& config) {
    config.algorithm.use_kl_in_reward = true;
    config.algorithm.kl_ctrl = {
        .type = KlCtrlType::kAdaptive, .kl_coef = 0.5, .horizon = 10, .target_kl = 0.1};
  });
  auto batch = two_answers();
  batch.ref_log_prob = at::full({5}, -2.F);
  KlController kl(run.config.algorithm.kl_ctrl);
  Metrics metrics;
  const auto answer = run.see(run.batch_worker.compute_advantages(batch, kl, metrics));
  EXPECT_EQ(numbers(answer.token_level_rewards),
            (std::vector<float>{-0.5F, -0.5F, 0.5F, -0.5F, -0.5F}));
  EXPECT_NEAR(kl.value(), 0.5 * 1.04, 1e-12);
  EXPECT_NEAR(metrics.at("actor/reward_kl_penalty"), 1, 1e-6);
}

TEST(BatchWorker, ComparesTheActorsLogProbabilitiesWithTheRollouts) {
  TinyRun run;
  auto batch = two_answers();
  batch.old_log_probs = at::full({5}, std::log(0.5F));
  batch.rollout_log_probs = at::full({5}, std::log(0.25F));
  const auto metrics = run.batch_worker.compare_log_probs(batch);
  EXPECT_NEAR(metrics.at("training/rollout_probs_diff_max"), 0.25, 1e-6);
  EXPECT_NEAR(metrics.at("actor/entropy"), 3, 1e-6);  // the mean over tokens
}

TEST(BatchWorker, ComparesNothingWhereTheRolloutsAreTaken) {
  TinyRun run([](PpoConfig& config) { config.algorithm.rollout_correction.bypass_mode = true; });
  EXPECT_TRUE(run.batch_worker.compare_log_probs(two_answers()).empty());
}

TEST(BatchWorker, MetricsAreOfTheWholeBatch) {
  TinyRun run;
  auto batch = two_answers();
  KlController kl(run.config.algorithm.kl_ctrl);
  Metrics metrics;
  batch.take(run.batch_worker.compute_advantages(batch, kl, metrics));
  batch.agent_info = {{{"num_turns", 2}, {"exchanges", 1}}, {{"num_turns", 5}, {"exchanges", 1}}};
  const auto found = run.batch_worker.compute_metrics(batch);
  EXPECT_EQ(found.at("critic/score/mean"), 0.5);
  EXPECT_EQ(found.at("response_length/mean"), 2.5);
  EXPECT_EQ(found.at("num_turns/max"), 5);
}

TEST(BatchWorker, MetricsWithoutAdvantagesAreRefused) {
  TinyRun run;
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"compute_metrics", "are not known"},
                             [&] { (void)run.batch_worker.compute_metrics(two_answers()); }));
}

TEST(BatchWorker, WritesALineForEachAnswer) {
  TinyRun run;
  run.batch_worker.write_rollouts(3, two_answers());
  const auto text = run.read("rollouts/3.jsonl");
  EXPECT_EQ(std::ranges::count(text, '\n'), 2);
  const auto line = distckpt::parse_json(text.substr(0, text.find('\n')), "line");
  EXPECT_EQ(line, nlohmann::json({{"input", "?"},
                                  {"output", "yes"},
                                  {"gts", "y"},
                                  {"score", 1.0},
                                  {"step", 3},
                                  {"acc", 1.0}}));
}

TEST(BatchWorker, WritesTheTurnsOfAnAnswer) {
  const auto lines_of = [](TinyRun& run) {
    auto batch = two_answers();
    batch.response_mask = at::tensor({1, 0, 1, 1, 1}, at::kByte).to(at::kBool);
    run.batch_worker.write_rollouts(3, batch);
    return run.read("rollouts/3.jsonl");
  };
  TinyRun run;
  const auto text = lines_of(run);
  const auto line = distckpt::parse_json(text.substr(0, text.find('\n')), "line");
  EXPECT_EQ(line["turns"], nlohmann::json::parse(R"([[true, "y"], [false, "e"], [true, "s"]])"));
  EXPECT_EQ(text.find("turns", text.find('\n')), text.npos);
  TinyRun rejecting([](PpoConfig& config) {  // its mask has holes that are no turns
    config.algorithm.rollout_correction.rollout_rs = {{RejectionOption::Of::kToken, 1}};
  });
  EXPECT_EQ(lines_of(rejecting).find("turns"), std::string::npos);
}

TEST(BatchWorker, WritesSamplesWhereItIsTold) {
  TinyRun run([](PpoConfig& config) {
    config.trainer.validation_data_dir = config.trainer.run.default_local_dir + "/elsewhere";
  });
  run.batch_worker.write_validations(0, two_answers());
  EXPECT_TRUE(std::filesystem::exists(run.folder() / "elsewhere/0.jsonl"));
  EXPECT_FALSE(std::filesystem::exists(run.folder() / "validations"));
}

TEST(BatchWorker, WritesNoSamplesThatNobodyAsksFor) {
  TinyRun run([](PpoConfig& config) { config.trainer.log_samples = false; });
  run.batch_worker.write_rollouts(3, two_answers());
  EXPECT_FALSE(std::filesystem::exists(run.folder() / "rollouts"));
}

}  // namespace batch_worker_test
}  // namespace ferry::trainer
