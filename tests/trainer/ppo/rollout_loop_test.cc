#include "trainer/ppo/rollout_loop.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/support/expect.h"
#include "tests/trainer/ppo/tiny_run.h"

namespace ferry::trainer {
namespace rollout_loop_test {

using support::TinyRun;
using Tokens = std::vector<std::int64_t>;

Tokens tokens_of(const RolloutBatch& batch) {
  const auto* const begin = batch.tokens.const_data_ptr<std::int64_t>();
  return {begin, begin + batch.tokens.numel()};
}

RolloutBatch first_batch(TinyRun& run) {
  run.workers.begin_step(1);
  run.log.begin_step(1);
  return run.see(run.rollout.next_batch(0));
}

TEST(RolloutLoop, ABatchHasTheAnswersToEachPromptBehindEachOther) {
  TinyRun run;
  const auto batch = first_batch(run);
  ASSERT_EQ(batch.size(), 4);
  const std::vector<std::string> prompts{"u1+1?<s>a", "u1+1?<s>a", "u1+20?<s>a", "u1+20?<s>a"};
  for (std::int64_t row = 0; row < 4; ++row) {
    EXPECT_EQ(run.encoder.decode(batch.prompt(row), false), prompts[static_cast<std::size_t>(row)]);
    EXPECT_GE(batch.response_length(row), 1);
    EXPECT_LE(batch.response_length(row), 6);
  }
  EXPECT_EQ(batch.uid[0], batch.uid[1]);
  EXPECT_NE(batch.uid[1], batch.uid[2]);
}

TEST(RolloutLoop, ABatchHasScores) {
  TinyRun run;
  const auto batch = first_batch(run);
  ASSERT_EQ(batch.scores.numel(), 4);
  for (const auto& extra : batch.reward_extra_info) EXPECT_EQ(extra.at("acc"), 0.0);
}

TEST(RolloutLoop, ARunDrawsTheSameAnswersAgain) {
  TinyRun one, other;
  EXPECT_EQ(tokens_of(first_batch(one)), tokens_of(first_batch(other)));
}

TEST(RolloutLoop, AnotherSeedDrawsOtherAnswers) {
  TinyRun one, other([](PpoConfig&config) { config.trainer.run.seed = 43; });
  EXPECT_NE(tokens_of(first_batch(one)), tokens_of(first_batch(other)));
}

TEST(RolloutLoop, TheNextStepDrawsOtherAnswersToTheSamePrompts) {
  TinyRun run;
  const auto one = first_batch(run);
  run.workers.begin_step(2);
  const auto next = run.see(run.rollout.next_batch(1));
  EXPECT_EQ(run.encoder.decode(next.prompt(0), false), "u1+1?<s>a");
  EXPECT_NE(tokens_of(one), tokens_of(next));
  EXPECT_EQ(run.log.metrics().at("training/epoch"), 1);
}

// The model is random: no answer is right, so that no group has answers of different worth.
TEST(RolloutLoop, GivesUpOnGroupsThatNeverDiffer) {
  TinyRun run([](PpoConfig& config) {
    config.algorithm.filter_groups = {.enable = true, .metric = "acc", .max_num_gen_batches = 2};
  });
  EXPECT_TRUE(support::fails(ErrorKind::kUsage,
                             {"0 of 2 groups differ in acc after 2 batches", "too hard"},
                             [&] { first_batch(run); }));
}

TEST(RolloutLoop, ValidatesEachPromptOnce) {
  TinyRun run;
  run.rollout.wake(0);
  const auto metrics = run.rollout.validate(0);
  EXPECT_EQ(metrics.at("val-core/openai/gsm8k/acc/mean@1"), 0);
  EXPECT_EQ(metrics.at("val/malformed_rows"), 0);
  const auto samples = run.read("validations/0.jsonl");
  EXPECT_EQ(std::ranges::count(samples, '\n'), 2);
}

TEST(RolloutLoop, CountsMalformedRowsOfAValidation) {
  TinyRun run([](PpoConfig& config) {
    distckpt::write_text(config.data.val_files[0] + ".val.jsonl",
                         std::string(support::kSums) + "{\"prompt\": 5}\n");
    config.data.val_files[0] += ".val.jsonl";
  });
  run.rollout.wake(0);
  EXPECT_EQ(run.rollout.validate(0).at("val/malformed_rows"), 1);
  ASSERT_EQ(run.said.size(), 1U);
  EXPECT_TRUE(run.said[0].starts_with("skipped    ")) << run.said[0];
}

TEST(PromptParser, RefusesImagesForAProgram) {
  const support::ByteFolder folder;
  const PromptEncoder encoder(folder.path(), {});
  PpoConfig config;
  config.rollout.agents.agent.program_command = "play";
  config.rollout.agents.agent.default_agent_loop = AgentLoopKind::kProgram;
  const auto record = Record::parse(R"({"data_source": "d", "prompt": [{"role": "user", "content":
      [{"type": "image"}]}], "images": [{"path": "a.png"}],
      "reward_model": {"style": "rule", "ground_truth": "2"}})");
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"has images, which programs of program_agent"},
                             [&] { prompt_parser(encoder, config)(record); }));
}

}  // namespace rollout_loop_test
}  // namespace ferry::trainer
