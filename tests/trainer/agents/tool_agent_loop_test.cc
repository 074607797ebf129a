#include "trainer/agents/tool_agent_loop.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

namespace ferry::trainer {
namespace tool_agent_loop_test {

using nlohmann::json;

std::string call(const std::string& name, const std::string& arguments) {
  return "<tool_call>{\"name\": \"" + name + "\", \"arguments\": " + arguments + "}</tool_call>";
}

class ToolAgentLoopTest : public testing::Test {
 protected:
  static ToolAgentLoop loop(int max_parallel_calls) {
    Tools tools;
    tools.names = {"add", "find"};
    tools.program_of = {0, 1};
    tools.programs.resize(2);
    return {tools, MultiTurnSection{.max_parallel_calls = max_parallel_calls,
                                    .max_tool_response_length = 20}};
  }

  ToolAgentLoopTest() {
    session_.seed = 7;
    session_.assistant_turns = 1;
    session_.response.resize(3);
  }

  ToolAgentLoop loop_ = loop(3);
  Session session_;
};

TEST_F(ToolAgentLoopTest, ATurnWithoutACallIsTheLast) {
  EXPECT_TRUE(loop_.turn_is_over(session_, "It is 4.").empty());
  EXPECT_EQ(session_.messages.back(),
            (Messages::value_type{{"role", "assistant"}, {"content", "It is 4."}}));
}

TEST_F(ToolAgentLoopTest, CallsAreQuestionsToTheirPrograms) {
  const auto asked = loop_.turn_is_over(
      session_, "Let me see. " + call("find", "{\"q\": \"x\"}") + call("add", "{}"));
  ASSERT_EQ(asked.size(), 2U);
  EXPECT_EQ(asked[0].program, 1U);
  EXPECT_EQ(asked[0].body, json({{"session", 7}, {"name", "find"}, {"arguments", {{"q", "x"}}}}));
  EXPECT_EQ(asked[1].program, 0U);
  EXPECT_FALSE(asked[0].known || asked[1].known);
  EXPECT_EQ(session_.messages.back().at("tool_calls").at(1).at("id"), "call00101");
}

TEST_F(ToolAgentLoopTest, AToolThatIsNoneIsAnsweredAtOnce) {
  const auto asked = loop_.turn_is_over(session_, call("rm", "{}"));
  EXPECT_EQ(asked.at(0).known, json({{"error", "there is no such tool, but: add, find"}}));
}

TEST_F(ToolAgentLoopTest, CallsBeyondTheirLimitAreNotMade) {
  auto one = loop(1);
  EXPECT_EQ(one.turn_is_over(session_, call("add", "{}") + call("find", "{}")).size(), 1U);
  EXPECT_EQ(session_.messages.back().at("tool_calls").size(), 1U);
}

TEST_F(ToolAgentLoopTest, ACallThatIsNoJsonIsText) {
  EXPECT_TRUE(loop_.turn_is_over(session_, "<tool_call>{\"name\": </tool_call>").empty());
}

TEST_F(ToolAgentLoopTest, AnswersAreMessagesInTheOrderOfTheCalls) {
  (void)loop_.turn_is_over(session_, call("add", "{}") + call("find", "{}") + call("find", "{}"));
  const std::vector<json> answers{{{"content", 4}, {"reward", 0.5}},
                                  {{"content", {{"a", "\xff"}}}, {"reward", "much"}},
                                  {{"error", "no answer within 5 s"}}};
  EXPECT_EQ(loop_.answered(session_, answers).num_messages, 3U);
  const auto& said = session_.messages;
  EXPECT_EQ(said[1].at("content"), "4");
  EXPECT_EQ(said[1].at("tool_call_id"), "call00100");
  EXPECT_EQ(said[2].at("content"), "{\"a\":\"\uFFFD\"}");
  EXPECT_NE(said[3].at("content").get<std::string>().find("(truncated)"), std::string::npos);
  EXPECT_EQ(session_.turn_scores, (std::vector<std::pair<std::size_t, double>>{{2, 0.5}}));
}

TEST_F(ToolAgentLoopTest, AnAnswerMaySayNothing) {
  (void)loop_.turn_is_over(session_, call("add", "{}"));
  EXPECT_EQ(loop_.answered(session_, std::vector{json::object()}).num_messages, 1U);
  EXPECT_EQ(session_.messages.back().at("content"), "");
}

}  // namespace tool_agent_loop_test
}  // namespace ferry::trainer
