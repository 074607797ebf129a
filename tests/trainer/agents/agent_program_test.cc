#include "trainer/agents/agent_program.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

namespace ferry::trainer {
namespace agent_program_test {

using nlohmann::json;
using std::chrono::milliseconds;

// A program of the shell that answers each line by `answer`, where $id is the question's.
std::string answers(const std::string& answer) {
  return R"(while read -r line; do id=${line#*'"id":'}; id=${id%%[,\}]*}; )" + answer + "; done";
}

// All answers to the questions that are open.
std::vector<AgentAnswer> all(AgentProgram& program, std::size_t count) {
  std::vector<AgentAnswer> found;
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (found.size() < count && std::chrono::steady_clock::now() < until)
    for (auto& one : program.answers(milliseconds(50))) found.push_back(std::move(one));
  return found;
}

TEST(AgentProgram, IsStartedOnceAndAnswersById) {
  AgentProgram program(
      {.command = "n=0; " + answers(R"(n=$((n+1)); echo "{\"id\": $id, \"content\": $n}")")});
  for (const std::int64_t id : {7, 8}) program.ask(id, {{"name", "f"}});
  const auto found = all(program, 2);
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[0].id, 7);
  EXPECT_EQ(found[0].answer, (json{{"content", 1}}));
  EXPECT_EQ(found[1].answer, (json{{"content", 2}}));
}

TEST(AgentProgram, AnswersAnErrorInTimeForOneThatHangs) {
  AgentProgram program({.command = "sleep 600", .timeout = milliseconds(50)});
  program.ask(1, json::object());
  const auto found = all(program, 1);
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].answer.at("error"), "no answer within 0.05 s");
}

TEST(AgentProgram, StartsAnewAfterItsEnd) {
  AgentProgram program(
      {.command = R"(read line; id=${line#*'"id":'}; echo "{\"id\": ${id%%[,\}]*}}")"});
  program.ask(1, json::object());
  program.ask(2, json::object());
  const auto found = all(program, 2);
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[0].answer, json::object());
  EXPECT_EQ(found[1].answer.at("error"), "the program ended (exit status 0)");
  program.ask(3, json::object());
  EXPECT_EQ(all(program, 1).at(0).answer, json::object());
}

TEST(AgentProgram, GivesUpOnOneThatTalksOfSomethingElse) {
  AgentProgram program({.command = answers(R"(echo "{\"id\": 12345}")")});
  program.ask(1, json::object());
  EXPECT_TRUE(all(program, 1).at(0).answer.contains("error"));
}

}  // namespace agent_program_test
}  // namespace ferry::trainer
