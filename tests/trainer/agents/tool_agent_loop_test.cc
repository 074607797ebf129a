#include "trainer/agents/tool_agent_loop.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/trainer/dataset/byte_folder.h"
#include "trainer/dataset/prompt_examples.h"

namespace ferry::trainer {
namespace tool_agent_loop_test {

using nlohmann::json;

std::string call(const std::string& name, const std::string& arguments) {
  return "<tool_call>{\"name\": \"" + name + "\", \"arguments\": " + arguments + "}</tool_call>";
}

class ToolAgentLoopTest : public testing::Test {
 protected:
  ToolAgentLoop loop(int max_parallel_calls, std::optional<std::string> reasoning_parser = {}) {
    Tools tools;
    tools.names = {"add", "find"};
    for (const auto& name : tools.names)
      tools.schemas.push_back({{"type", "function"}, {"function", {{"name", name}}}});
    tools.program_of = {0, 1};
    tools.programs.resize(2);
    return {tools,
            AgentSections{.multi_turn = {.max_parallel_calls = max_parallel_calls,
                                         .max_tool_response_length = 20,
                                         .reasoning_parser = std::move(reasoning_parser)}},
            encoder_};
  }

  ToolAgentLoopTest() {
    session_.seed = 7;
    session_.assistant_turns = 1;
    session_.response.resize(3);
  }

  std::vector<std::int64_t> tokens(std::string_view text) const {
    const auto ids = encoder_.tokenizer().encode(text, {.add_special_tokens = false});
    return {ids.begin(), ids.end()};
  }

  support::ByteFolder folder_;
  PromptEncoder encoder_{folder_.path(), {}};
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

TEST_F(ToolAgentLoopTest, CallsWithinThoughtsAreNone) {
  const auto thinker = loop(3, "qwen3");
  const auto thought = "I could " + call("add", "{}");
  const auto asked =
      thinker.turn_is_over(session_, "<think>" + thought + "</think>No." + call("find", "{}"));
  ASSERT_EQ(asked.size(), 1U);
  EXPECT_EQ(asked[0].body.at("name"), "find");
  const auto& message = session_.messages.back();
  EXPECT_EQ(message.at("reasoning_content"), thought);
  EXPECT_EQ(message.at("content"), "No.");
  EXPECT_EQ(message.at("tool_calls").size(), 1U);
  EXPECT_TRUE(thinker.turn_is_over(session_, thought).empty());  // which have no end
  EXPECT_EQ(loop_.turn_is_over(session_, "<think>" + thought + "</think>").size(), 1U);
}

// The template has begun or ended the thoughts, in front of the first turn or of a later one.
TEST_F(ToolAgentLoopTest, TheTokensBeforeATurnSayWhetherItThinks) {
  const auto thinker = loop(3, "deepseek_v3");
  const auto text = call("add", "{}") + "</think>" + call("find", "{}");
  session_.prompt = tokens("u:x a:<think>\n");
  session_.response.clear();
  EXPECT_EQ(thinker.turn_is_over(session_, text).size(), 1U);
  for (const auto id : tokens("<think>y</think>z t:1 a:"))
    session_.response.push_back({.token_id = id});
  session_.turn_begin = session_.response.size();
  EXPECT_EQ(thinker.turn_is_over(session_, text).size(), 2U);
}

TEST_F(ToolAgentLoopTest, AToolThatIsNoneIsAnsweredAtOnce) {
  const auto asked = loop_.turn_is_over(session_, call("rm", "{}"));
  EXPECT_EQ(asked.at(0).known, json({{"error", "there is no such tool, but: add, find"}}));
}

TEST_F(ToolAgentLoopTest, ToolsThatARecordSelectsAreTheOnlyOnes) {
  session_.task = {{"extra_info", {{"tool_selection", {"find", "none"}}}}};
  const auto shown = loop_.tools(session_);
  ASSERT_EQ(shown.size(), 1U);
  EXPECT_EQ(shown[0].at("function").at("name"), "find");
  const auto asked = loop_.turn_is_over(session_, call("add", "{}") + call("find", "{}"));
  EXPECT_EQ(asked.at(0).known, json({{"error", "there is no such tool, but: find"}}));
  EXPECT_FALSE(asked.at(1).known);
  session_.task["extra_info"]["tool_selection"] = json::array();
  EXPECT_EQ(loop_.tools(session_).size(), 2U);
}

TEST_F(ToolAgentLoopTest, AToolIsToldWhatTheRecordHasForItAndTheJournalIsNot) {
  const json kwargs{{"create_kwargs", {{"ground_truth", "4"}}}};
  session_.task = {{"extra_info", {{"tools_kwargs", {{"add", kwargs}, {"find", nullptr}}}}}};
  const auto asked = loop_.turn_is_over(session_, call("add", "{}") + call("find", "{}"));
  EXPECT_EQ(asked.at(0).details, json({{"tools_kwargs", kwargs}}));
  EXPECT_FALSE(asked.at(0).body.contains("tools_kwargs"));
  EXPECT_TRUE(asked.at(1).details.is_null());
}

TEST_F(ToolAgentLoopTest, AnIntegerThatNoProgramWouldGetAsItIsIsAnErrorOfTheTool) {
  const auto asked = loop_.turn_is_over(
      session_, call("add", R"({"a": 9223372036854775807, "b": [18446744073709551616]})") +
                    call("add", R"({"a": 9223372036854775807})"));
  ASSERT_EQ(asked.size(), 2U);
  EXPECT_EQ(asked[0].known, json({{"error", "18446744073709551616 has more than 64 bits"}}));
  EXPECT_FALSE(asked[1].known);
  EXPECT_EQ(asked[1].body.at("arguments").at("a"), std::int64_t{9223372036854775807});
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
                                  {{"content", {{"a", "\xff"}}}, {"reward", nullptr}},
                                  {{"error", "no answer within 5 s"}}};
  EXPECT_EQ(loop_.answered(session_, answers).num_messages, 3U);
  const auto& said = session_.messages;
  EXPECT_EQ(said[1].at("content"), "4");
  EXPECT_EQ(said[1].at("tool_call_id"), "call00100");
  EXPECT_EQ(said[2].at("content"), "{\"a\":\"\uFFFD\"}");
  EXPECT_NE(said[3].at("content").get<std::string>().find("(truncated)"), std::string::npos);
  EXPECT_EQ(session_.turn_scores, (std::vector<std::pair<std::size_t, double>>{{2, 0.5}}));
}

TEST_F(ToolAgentLoopTest, TellsTheModelOfARewardThatIsNoneOfFloat32) {
  const AgentSections config{
      .multi_turn = {.max_parallel_calls = 9, .max_tool_response_length = 200}};
  Tools tools;
  tools.names = {"add"};
  tools.program_of = {0};
  tools.programs.resize(1);
  const ToolAgentLoop loop(tools, config, encoder_);
  const std::vector<json> rewards{
      1e39, -1e300, "much", true, json::array({1}), 3e38, 2e38, 18446744073709551615U};
  Session session{.seed = 7, .response = std::vector<rollout::TokenOutput>(3)};
  std::string calls;
  std::vector<json> answers;
  for (const auto& reward : rewards) {
    calls += call("add", "{}");
    answers.push_back({{"content", "4"}, {"reward", reward}});
  }
  (void)loop.turn_is_over(session, calls);
  EXPECT_EQ(loop.answered(session, answers).num_messages, rewards.size());
  for (std::size_t i = 0; i < rewards.size(); ++i) {
    const auto said = session.messages.at(i + 1).at("content").get<std::string>();
    const bool is_good = i == 5 || i == 7;  // 2e38 is too much behind 3e38
    EXPECT_EQ(said, is_good
                        ? "4"
                        : "Error executing tool 'add': its reward is no number, or too large: " +
                              rewards[i].dump());
  }
  EXPECT_EQ(session.turn_scores,
            (std::vector<std::pair<std::size_t, double>>{{2, 3e38}, {2, 18446744073709551615.0}}));
}

TEST_F(ToolAgentLoopTest, AnAnswerMaySayNothing) {
  (void)loop_.turn_is_over(session_, call("add", "{}"));
  EXPECT_EQ(loop_.answered(session_, std::vector{json::object()}).num_messages, 1U);
  EXPECT_EQ(session_.messages.back().at("content"), "");
}

}  // namespace tool_agent_loop_test
}  // namespace ferry::trainer
