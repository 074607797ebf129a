#include "trainer/agents/env_agent_loop.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/expect.h"

namespace ferry::trainer {
namespace env_agent_loop_test {

using nlohmann::json;

class EnvAgentLoopTest : public testing::Test {
 protected:
  EnvAgentLoopTest() {
    session_.seed = 7;
    session_.task = {{"ground_truth", "12"}};
    session_.messages.push_back({{"role", "user"}, {"content", "Guess."}});
    session_.response.resize(3);
  }

  std::size_t answered(const json& answer) {
    return loop_.answered(session_, std::vector{answer}).num_messages;
  }
  testing::AssertionResult refuses(const json& answer, std::string_view why) {
    return support::fails(ErrorKind::kCorrupt, {"the environment", why, answer.dump()},
                          [&] { answered(answer); });
  }

  EnvAgentLoop loop_{AgentSection{.env_command = "play", .env_timeout = 5}};
  Session session_;
};

TEST_F(EnvAgentLoopTest, IsOneProgram) {
  ASSERT_EQ(loop_.programs().size(), 1U);
  EXPECT_EQ(loop_.programs()[0].command, "play");
  EXPECT_EQ(loop_.programs()[0].timeout, std::chrono::seconds(5));
}

TEST_F(EnvAgentLoopTest, BeginsWithTheTaskOfTheRecord) {
  EXPECT_EQ(loop_.begin(session_).at(0).body,
            json({{"method", "reset"}, {"session", 7}, {"ground_truth", "12"}}));
  EXPECT_EQ(loop_.begun(session_, std::vector{json::object()}).num_messages, 0U);
  EXPECT_EQ(loop_.begun(session_, std::vector{json{{"observation", nullptr}}}).num_messages, 0U);
  EXPECT_EQ(session_.messages.size(), 1U);
  EXPECT_EQ(loop_.begun(session_, std::vector{json{{"observation", "1 to 20"}}}).num_messages, 1U);
  EXPECT_EQ(session_.messages.back().at("content"), "1 to 20");
}

TEST_F(EnvAgentLoopTest, EndsASessionWhoseStepTakesTooLong) {
  const std::vector late{json{{"error", "no answer within 5 s"}, {"timed_out", true}}};
  EXPECT_THROW(loop_.begun(session_, late), Error);
  EXPECT_THROW(loop_.answered(session_, late), Error);  // nothing to learn from
  session_.assistant_turns = 1;
  EXPECT_TRUE(loop_.answered(session_, late).is_cut_off);
  EXPECT_EQ(session_.extra_info, json({{"timed_out", 1}}));
  EXPECT_EQ(loop_.cut_off(session_), json({{"method", "close"}, {"session", 7}}));
}

TEST_F(EnvAgentLoopTest, TakesATurnAsAnAction) {
  EXPECT_EQ(loop_.turn_is_over(session_, "11").at(0).body,
            json({{"method", "step"}, {"session", 7}, {"action", "11"}}));
  EXPECT_EQ(session_.messages.back().at("role"), "assistant");
  EXPECT_EQ(answered({{"observation", "more"}, {"reward", 0.25}, {"info", {{"moves", 1}}}}), 1U);
  EXPECT_EQ(session_.messages.back().at("content"), "more");
  EXPECT_EQ(session_.turn_scores, (std::vector<std::pair<std::size_t, double>>{{2, 0.25}}));
  EXPECT_EQ(session_.extra_info, json({{"moves", 1}}));
}

TEST_F(EnvAgentLoopTest, EndsWhenItIsDone) {
  const auto before = session_.messages.size();
  EXPECT_EQ(answered({{"observation", "right"}, {"reward", 1}, {"done", true}}), 0U);
  EXPECT_EQ(session_.messages.size(), before);
  EXPECT_EQ(session_.turn_scores.at(0).second, 1);
}

TEST_F(EnvAgentLoopTest, KeepsNoRewardOfNothing) {
  EXPECT_EQ(answered({{"observation", "more"}, {"reward", 0}}), 1U);
  EXPECT_TRUE(session_.turn_scores.empty());
}

TEST_F(EnvAgentLoopTest, RefusesWhatIsNoAnswer) {
  EXPECT_TRUE(refuses({{"error", "no answer within 5 s"}}, "it reports an error"));
  EXPECT_TRUE(refuses({{"observation", 5}}, "an observation is text"));
  EXPECT_TRUE(refuses({{"observation", "a"}, {"reward", "1"}}, "a reward is a number"));
  EXPECT_TRUE(refuses({{"observation", "a"}, {"done", "yes"}}, "done is true or false"));
  EXPECT_TRUE(refuses(json::object(), "it is not done, and says nothing"));
}

TEST_F(EnvAgentLoopTest, IsToldOfASessionThatEndsBeforeIt) {
  EXPECT_EQ(loop_.cut_off(session_), json({{"method", "close"}, {"session", 7}}));
}

}  // namespace env_agent_loop_test
}  // namespace ferry::trainer
