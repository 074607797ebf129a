#include "trainer/agents/agent_program.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/trainer/agents/program_answers.h"

namespace ferry::trainer {
namespace agent_program_test {

using nlohmann::json;
using std::chrono::milliseconds;

// A program of the shell that answers each line by `answer`, where $id is the question's.
std::string answers(const std::string& answer) {
  return R"(while read -r line; do id=${line#*'"id":'}; id=${id%%[,\}]*}; )" + answer + "; done";
}

TEST(AgentProgram, IsStartedOnceAndAnswersById) {
  AgentProgram program(
      {.command = "n=0; " + answers(R"(n=$((n+1)); echo "{\"id\": $id, \"content\": $n}")")});
  for (const std::int64_t id : {7, 8}) program.ask(id, {{"name", "f"}});
  const auto found = all_answers(program, 2);
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[0].id, 7);
  EXPECT_EQ(found[0].answer, (json{{"content", 1}}));
  EXPECT_EQ(found[1].answer, (json{{"content", 2}}));
}

TEST(AgentProgram, AnswersAnErrorInTimeForOneThatHangs) {
  AgentProgram program({.command = "sleep 600", .timeout = milliseconds(50)});
  program.ask(1, json::object());
  const auto found = all_answers(program, 1);
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].answer.at("error"), "no answer within 0.05 s");
}

json timed_out(const char* seconds) {
  return {{"error", std::string("no answer within ") + seconds + " s"}, {"timed_out", true}};
}

// The answers to so many questions, by id.
std::map<std::int64_t, json> answers_of(AgentProgram& program, std::size_t count) {
  std::map<std::int64_t, json> found;
  for (auto& one : all_answers(program, count)) found[one.id] = std::move(one.answer);
  return found;
}

// It never answers 2, and 3 after a while.
const auto kConcurrent = answers(
    R"(case $id in 2) ;; 3) (sleep 0.6; echo "{\"id\": 3}") & ;; *) echo "{\"id\": $id, \"pid\": $$}" ;; esac)");

TEST(AgentProgram, FailsTheQuestionThatHangsAloneAndHearsItsLateAnswer) {
  AgentProgram program({.command = kConcurrent, .timeout = milliseconds(400)});
  for (const std::int64_t id : {1, 2, 3, 4}) program.ask(id, json::object());
  auto found = answers_of(program, 4);
  const auto pid = found[1].at("pid");
  EXPECT_EQ(found[2], timed_out("0.4"));
  EXPECT_EQ(found[3], timed_out("0.4"));
  EXPECT_EQ(found[4].at("pid"), pid);
  std::this_thread::sleep_for(milliseconds(400));
  program.ask(5, json::object());
  EXPECT_EQ(answers_of(program, 1)[5].at("pid"), pid);
}

// One after the other: it hangs at 2, and the questions behind that wait.
const auto kOneByOne = answers(R"([ $id = 2 ] && sleep 600; echo "{\"id\": $id, \"pid\": $$}")");

TEST(AgentProgram, AsksWhatWaitsBehindTheOneThatHangsAgain) {
  AgentProgram program({.command = kOneByOne, .timeout = milliseconds(300)});
  for (const std::int64_t id : {1, 2, 3, 4}) program.ask(id, json::object());
  auto found = answers_of(program, 4);
  EXPECT_EQ(found[2], timed_out("0.3"));
  EXPECT_TRUE(found[1].contains("pid"));
  EXPECT_TRUE(found[3].contains("pid"));
  EXPECT_EQ(found[4], found[3]);
  EXPECT_NE(found[4], found[1]);
}

TEST(AgentProgram, GivesUpWhenItHangsAgainAndAgain) {
  AgentProgram program({.command = "sleep 600", .timeout = milliseconds(200)});
  for (std::int64_t id = 1; id <= 6; ++id) program.ask(id, json::object());
  const auto begin = std::chrono::steady_clock::now();
  auto found = answers_of(program, 6);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  for (std::int64_t id = 1; id <= 6; ++id)
    EXPECT_EQ(found[id], id <= 2 ? timed_out("0.2") : json({{"error", "no answer within 0.2 s"}}));
}

TEST(AgentProgram, DoesNotCountTheTimeBehindOthersIfItAnswersOneByOne) {
  AgentProgram program(
      {.command = answers(R"(sleep 0.2; echo "{\"id\": $id}")"), .timeout = milliseconds(600)});
  for (std::int64_t id = 0; id < 6; ++id) program.ask(id, json::object());
  for (const auto& [id, answer] : answers_of(program, 6)) EXPECT_EQ(answer, json::object()) << id;
}

TEST(AgentProgram, GivesUpOneThatKeepsSessionsWhenItIsSilentForASecondTime) {
  AgentProgram program(
      {.command = kOneByOne, .timeout = milliseconds(300), .keeps_sessions = true});
  for (const std::int64_t id : {1, 2, 3, 4}) program.ask(id, json::object());
  auto found = answers_of(program, 4);
  EXPECT_EQ(found[2], timed_out("0.3"));
  for (const std::int64_t id : {3, 4})
    EXPECT_EQ(found[id], (json{{"error", "no answer within 0.3 s"}}));
}

TEST(AgentProgram, StartsAnewAfterItsEnd) {
  AgentProgram program(
      {.command = R"(read line; id=${line#*'"id":'}; echo "{\"id\": ${id%%[,\}]*}}")"});
  program.ask(1, json::object());
  program.ask(2, json::object());
  const auto found = all_answers(program, 2);
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[0].answer, json::object());
  EXPECT_EQ(found[1].answer.at("error"), "the program ended (exit status 0)");
  program.ask(3, json::object());
  EXPECT_EQ(all_answers(program, 1).at(0).answer, json::object());
}

// One after the other: it ends at 2.
const auto kEnding = answers(R"([ $id = 2 ] && exit 3; echo "{\"id\": $id, \"pid\": $$}")");
const json kEnded{{"error", "the program ended (exit status 3)"}};

TEST(AgentProgram, FailsTheQuestionAtWhichItEndsAlone) {
  for (const auto& command : {kEnding, answers(R"([ $id = 2 ] && echo Traceback && exit 3;
                                                  echo "{\"id\": $id, \"pid\": $$}")")}) {
    AgentProgram program({.command = command});
    for (const std::int64_t id : {1, 2, 3, 4}) program.ask(id, json::object());
    auto found = answers_of(program, 4);
    EXPECT_TRUE(found[2].contains("error"));
    EXPECT_TRUE(found[1].contains("pid"));
    EXPECT_TRUE(found[3].contains("pid"));
    EXPECT_EQ(found[4], found[3]);
    EXPECT_NE(found[4], found[1]);
  }
}

TEST(AgentProgram, FailsAllQuestionsWhenItEndsAgainAndAgain) {
  AgentProgram program({.command = "read line; exit 3"});
  for (std::int64_t id = 1; id <= 6; ++id) program.ask(id, json::object());
  for (const auto& [id, answer] : answers_of(program, 6)) EXPECT_EQ(answer, kEnded) << id;
}

TEST(AgentProgram, FailsAllQuestionsWhereOneThatKeepsSessionsOrAnswersInAnyOrderEnds) {
  AgentProgram keeps({.command = kEnding, .keeps_sessions = true});
  for (const std::int64_t id : {1, 2, 3}) keeps.ask(id, json::object());
  auto found = answers_of(keeps, 3);
  EXPECT_EQ(found[2], kEnded);
  EXPECT_EQ(found[3], kEnded);
  AgentProgram any(
      {.command = answers(R"([ $id = 3 ] && echo "{\"id\": 3}"; [ $id = 4 ] && exit 3)")});
  for (const std::int64_t id : {1, 2, 3, 4}) any.ask(id, json::object());
  found = answers_of(any, 4);
  EXPECT_EQ(found[3], json::object());
  for (const std::int64_t id : {1, 2, 4}) EXPECT_EQ(found[id], kEnded) << id;
}

TEST(AgentProgram, GivesUpOnOneThatTalksOfSomethingElse) {
  AgentProgram program({.command = answers(R"(echo "{\"id\": 12345}")")});
  program.ask(1, json::object());
  EXPECT_TRUE(all_answers(program, 1).at(0).answer.contains("error"));
}

// The descriptors of this process.
std::ptrdiff_t descriptors() {
  using std::filesystem::directory_iterator;
  return std::distance(directory_iterator("/proc/self/fd"), directory_iterator());
}

// A hostile program gets an error with these words, and so does the next one, which is started
// anew.
void names(const std::string& command, const std::string& words) {
  const bool waits = words.starts_with("no answer");
  AgentProgram program({.command = command, .timeout = milliseconds(waits ? 500 : 30000)});
  for (const std::int64_t id : {1, 2}) {
    program.ask(id, {{"text", std::string(1 << 20, 'x')}});
    const auto found = all_answers(program, 1);
    ASSERT_EQ(found.size(), 1U) << command;
    EXPECT_EQ(found[0].id, id);
    EXPECT_NE(found[0].answer.at("error").get<std::string>().find(words), std::string::npos)
        << command << ": " << found[0].answer;
  }
}

TEST(AgentProgram, NamesTheFaultsOfAHostileOne) {
  const std::vector<std::pair<std::string, std::string>> faults{
      {"exec tr '\\0' x < /dev/zero", "a line of more than 16777216 bytes"},
      {"exec yes hello", "the answer is no JSON object: hello"},
      {"exec yes '{\"id\": 77}'", "something else than it was asked"},
      {R"(printf '{"id": 1, "content": "\377"}\n'; exec sleep 600)", "is no JSON object"},
      {R"(printf '{"id": 1, "content": "\000"}\n'; exec sleep 600)", "is no JSON object"},
      {R"(echo '{"id": 1e999}'; exec sleep 600)", "is no JSON object"},
      {"head -c 1000000 /dev/zero | tr '\\0' '['; echo; exec sleep 600", "is nested too deep"},
      {"exec <&-; exec sleep 600", "no answer within 0.5 s"},
      {"exec <&- >&-; exec sleep 600", "the program ended (closed its output)"},
      {"kill -11 $$", "the program ended (signal 11)"},
      {"trap '' TERM INT; while :; do :; done", "no answer within 0.5 s"},
  };
  const auto before = descriptors();
  {
    std::vector<std::jthread> at_a_time;
    for (const auto& [command, words] : faults) at_a_time.emplace_back(names, command, words);
  }
  EXPECT_EQ(descriptors(), before);
}

TEST(AgentProgram, LeavesNoneOfItsProcesses) {
  const auto mark = fmt::format("60{}", getpid());
  {
    AgentProgram program({.command = fmt::format("(sleep {0} & sleep {0} &) ; sleep {0}", mark),
                          .timeout = milliseconds(100)});
    program.ask(1, json::object());
    EXPECT_EQ(all_answers(program, 1).at(0).answer.at("error"), "no answer within 0.1 s");
  }
  EXPECT_NE(std::system(fmt::format("pgrep -f '^sleep {}'", mark).c_str()), 0);
}

}  // namespace agent_program_test
}  // namespace ferry::trainer
