// Rewards of a batch: the rule of each row, what the form earns, and the penalty for length.
#include "trainer/workers/reward_manager.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/expect.h"
#include "tests/trainer/dataset/byte_folder.h"

namespace ferry::trainer {
namespace reward_manager_test {

using support::ByteFolder;
using support::fails;

RolloutBatch::Tokens tokens_of(const std::string& text) {
  RolloutBatch::Tokens tokens;
  for (const char letter : text) tokens.push_back(static_cast<unsigned char>(letter));
  tokens.push_back(support::kEndOfText);
  return tokens;
}

RolloutBatch batch_of(const std::vector<std::string>& answers,
                      const std::string& data_source = "openai/gsm8k") {
  std::vector<RolloutBatch::Tokens> prompts, responses;
  for (const auto& answer : answers) {
    prompts.push_back(tokens_of("6*7?"));
    responses.push_back(tokens_of(answer));
  }
  auto batch = RolloutBatch::of(prompts, responses);
  batch.data_source.assign(answers.size(), data_source);
  batch.ground_truth.assign(answers.size(), "42");
  batch.extra_info.assign(answers.size(), nullptr);
  return batch;
}

RolloutBatch reward(const PpoConfig& config, const RolloutBatch& batch) {
  const ByteFolder folder;
  const PromptEncoder encoder(folder.path(), config.data);
  return RewardManager(config, encoder).compute_reward(batch);
}

float score_of(const RolloutBatch& rewards, std::int64_t row) {
  return rewards.scores[row].item<float>();
}

TEST(RewardManager, ScoresByTheRuleOfTheDataSource) {
  const auto rewards = reward({}, batch_of({"it is\n#### 42", "#### 43"}));
  EXPECT_EQ(score_of(rewards, 0), 1);
  EXPECT_EQ(score_of(rewards, 1), 0);
  EXPECT_EQ(rewards.reward_extra_info[0], nlohmann::json({{"acc", 1.0}, {"score", 1.0}}));
}

TEST(RewardManager, TakesANumberForItsText) {
  auto batch = batch_of({"#### 42"});
  batch.ground_truth[0] = 42;
  EXPECT_EQ(score_of(reward({}, batch), 0), 1);
}

TEST(RewardManager, RefusesDataWithoutARule) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"my/own"}, [] { reward({}, batch_of({"42"}, "my/own")); }));
}

TEST(RewardManager, AddsWhatTheFormEarns) {
  PpoConfig config;
  config.reward.format_pattern = "<a>.*</a>";
  config.reward.format_score = 0.25;
  const auto rewards = reward(config, batch_of({"<a>#### 42</a>", "#### 42"}));
  EXPECT_EQ(score_of(rewards, 0), score_of(rewards, 1) + 0.25F);
  EXPECT_EQ(rewards.reward_extra_info[0].at("format"), 0.25);
  EXPECT_EQ(rewards.reward_extra_info[1].at("format"), 0.0);
}

TEST(RewardManager, PunishesLengthBesideTheScore) {
  PpoConfig config;
  config.data.max_response_length = 10;
  config.reward.overlong_buffer = {.enable = true, .len = 4, .penalty_factor = 1};
  const auto rewards = reward(config, batch_of({"#### 42", "####42"}));  // 8 and 7 tokens
  EXPECT_EQ(score_of(rewards, 0), 1);
  EXPECT_EQ(rewards.overlong_reward[0].item<float>(), -0.5F);
  EXPECT_EQ(rewards.overlong_reward[1].item<float>(), -0.25F);
  EXPECT_EQ(rewards.reward_extra_info[0].at("overlong"), 1.0);
}

TEST(RewardManager, LeavesAnswersOfAnEnvironmentToIt) {
  PpoConfig config;
  config.rollout.agents.agent.env_command = "a program";
  auto batch = batch_of({"#### 42"}, "a game without a rule");
  batch.agent_name = {"env_agent"};
  const auto rewards = reward(config, batch);
  EXPECT_EQ(score_of(rewards, 0), 0);
  EXPECT_FALSE(rewards.reward_extra_info[0].contains("acc"));
}

TEST(ConversationOf, HasTheLastAnswerWhereLimitsCutItOff) {
  const ByteFolder folder;
  const PromptEncoder encoder(folder.path(), {});
  Session session;
  session.messages = Messages::parse(R"([{"role": "user", "content": "hi"}])");
  for (const auto token : tokens_of("yo")) session.response.push_back({.token_id = token});
  const auto cut = conversation_of(session, encoder);
  ASSERT_EQ(cut.size(), 2U);
  EXPECT_EQ(cut[1], nlohmann::json({{"role", "assistant"}, {"content", "yo"}}));
  session.messages.push_back({{"role", "assistant"}, {"content", "said"}});
  EXPECT_EQ(conversation_of(session, encoder).size(), 2U);
}

}  // namespace reward_manager_test
}  // namespace ferry::trainer
