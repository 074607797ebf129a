#include "trainer/agents/mcp_server.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/expect.h"
#include "tests/trainer/agents/program_answers.h"

namespace ferry::trainer {
namespace mcp_server_test {

using nlohmann::json;
using std::chrono::milliseconds;

// A server of the shell that has answered `initialize`, and has been told so.
std::string server(const std::string& then, const std::string& revision = "2025-06-18") {
  return R"(say() { echo '{"jsonrpc":"2.0",'"$1"'}'; }; read -r line; )"
         R"(say '"id":"initialize","result":{"protocolVersion":")" +
         revision + R"("}'; read -r line; )" + then;
}

AgentAnswer one(McpServer& program) {
  const auto found = all_answers(program, 1);
  return found.empty() ? AgentAnswer{.id = -1, .answer = {{"error", "nothing came"}}} : found[0];
}

// The answer to a call whose result is this.
json answer(const std::string& result) {
  McpServer program(
      {.command = server("read -r line; say '\"id\":7," + result + "'; read -r line")});
  program.ask(7, {{"name", "f"}, {"arguments", json::object()}, {"session", 1}});
  return one(program).answer;
}

TEST(McpServer, ListsThePagesOfItsTools) {
  McpServer program(
      {.command = server(
           R"(read -r line; say '"id":-1,"result":{"tools":[{"name":"a"}],"nextCursor":"x"}'; )"
           R"(read -r line; case "$line" in *'"cursor":"x"'*) )"
           R"(say '"id":-2,"result":{"tools":[{"name":"b"}]}';; esac; read -r line)")});
  EXPECT_EQ(program.list_tools("s").dump(), R"([{"name":"a"},{"name":"b"}])");
}

TEST(McpServer, ThatListsNothingIsNamed) {
  McpServer program(
      {.command =
           server(R"(read -r line; say '"id":-1,"error":{"code":-32601,"message":"no tools"}')")});
  EXPECT_TRUE(support::fails(ErrorKind::kIo, {"MCP server s", "no tools"},
                             [&] { (void)program.list_tools("s"); }));
}

TEST(McpServer, IsAnsweredWhereItAsks) {
  McpServer program(
      {.command =
           server(R"(read -r call; say '"id":"a","method":"ping"'; read -r pong; )"
                  R"(say '"id":1,"method":"roots/list"'; read -r none; )"
                  R"(case "$pong$none" in *'"result":{}'*-32601*) )"
                  R"(say '"id":7,"result":{"content":[{"type":"text","text":"good"}]}';; esac; )"
                  R"(read -r line)")});
  program.ask(7, {{"name", "f"}, {"arguments", json::object()}, {"session", 1}});
  EXPECT_EQ(one(program).answer, (json{{"content", "good"}}));
}

TEST(McpServer, MaySayWhatIsNoAnswer) {
  EXPECT_EQ(
      answer(
          R"("method":"notifications/message"'; echo hello; say '"id":7,"result":{"content":[]})"),
      (json{{"content", ""}}));
}

TEST(McpServer, MayAnswerInABatch) {
  McpServer program(
      {.command = server(
           R"(read -r line; read -r line; echo '[{"jsonrpc":"2.0","method":"notifications/x"},)"
           R"({"jsonrpc":"2.0","id":8,"result":{"content":[{"type":"text","text":"b"}]}},)"
           R"({"jsonrpc":"2.0","id":7,"result":{"content":[{"type":"text","text":"a"}]}}]'; read -r line)",
           "2025-03-26")});
  for (const int id : {7, 8})
    program.ask(id, {{"name", "f"}, {"arguments", json::object()}, {"session", 1}});
  const auto found = all_answers(program, 2);
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[0].id, 8);
  EXPECT_EQ(found[0].answer["content"], "b");
  EXPECT_EQ(found[1].id, 7);
}

TEST(McpServer, ContentIsTextLineByLine) {
  EXPECT_EQ(
      answer(R"("result":{"content":[{"type":"text","text":"a"},{"type":"image","data":"AA=="},)"
             R"({"type":"resource","resource":{"text":"b"}}]})"),
      (json{{"content", "a\n[image]\nb"}}));
  EXPECT_EQ(answer(R"("result":{"content":[],"structuredContent":{"z":1,"a":[2]}})"),
            (json{{"content", R"({"z":1,"a":[2]})"}}));
}

TEST(McpServer, ErrorsAreTheToolsOrTheProtocols) {
  EXPECT_EQ(answer(R"("result":{"isError":true,"content":[{"type":"text","text":"bad"}]})"),
            (json{{"error", "bad"}}));
  EXPECT_EQ(answer(R"("error":{"code":-32602,"message":"unknown tool"})"),
            (json{{"error", "unknown tool"}}));
  EXPECT_EQ(answer(R"("id":8,"result":{}'; say '"id":7,"result":{"content":[]})").at("error"),
            "the server answered something else than it was asked");
}

// The error of a call to a hostile server.
std::string error_of(const std::string& then, milliseconds timeout) {
  McpServer program({.command = server(then), .timeout = timeout});
  program.ask(7, {{"name", "f"}, {"arguments", json::object()}, {"session", 1}});
  return one(program).answer.value("error", "");
}

TEST(McpServer, FaultsOfAHostileOneAreNamed) {
  const std::string late = "no answer within 0.4 s";
  const std::vector<std::pair<std::string, std::string>> faults{
      {"exec sleep 600", late},
      {R"(exec yes '{"method":"notifications/message"}')", late},
      {"exec yes hello", late},
      {R"(exec <&-; exec yes '{"id":1,"method":"ping"}')", late},
      {R"(exec yes '{"id":1,"method":"ping"}')",
       "the server asks and asks, and does not read the answers"},
      {"head -c 1000000 /dev/zero | tr '\\0' '['; echo; exec sleep 600",
       "the server wrote a line that is nested too deep"},
      {"exec tr '\\0' x < /dev/zero", "a line of more than 16777216 bytes"},
  };
  std::vector<std::jthread> at_a_time;
  for (const auto& [then, error] : faults)
    at_a_time.emplace_back([&] {
      EXPECT_EQ(error_of(then, milliseconds(error == late ? 400 : 30000)), error) << then;
    });
}

// `cat` says our own words back: the request, and that it is not one which we answer.
TEST(McpServer, ThatIsNotInitializedIsNamedAndStartedAgain) {
  const std::vector<std::pair<std::string, std::string>> faults{
      {"exec sleep 600", "no answer within 0.4 s"},
      {"exec yes", "no answer within 0.4 s"},
      {"exec cat",
       R"(the server is not initialized: {"code":-32601,"message":"Method not found"})"},
      {"exit 3", "the program ended (exit status 3)"},
  };
  std::vector<std::jthread> at_a_time;
  for (const auto& [command, error] : faults)
    at_a_time.emplace_back([&] {
      McpServer program({.command = command, .timeout = milliseconds(400)});
      program.ask(1, {{"name", "f"}, {"arguments", json::object()}, {"session", 1}});
      EXPECT_EQ(one(program).answer.value("error", ""), error) << command;
      EXPECT_TRUE(support::fails(ErrorKind::kIo, {"MCP server s: lists no tools", error},
                                 [&] { (void)program.list_tools("s"); }));
    });
}

TEST(McpServer, ContentThatIsNoListIsNone) {
  for (const auto* const content : {R"("text")", "7", R"({"type":"text"})", "null"})
    EXPECT_EQ(answer(std::string(R"("result":{"content":)") + content + "}"),
              (json{{"content", ""}}));
  EXPECT_EQ(answer(R"("result":{"content":[1,null,{"type":[]},{"type":"resource","resource":1}]})"),
            (json{{"content", "[]\n[]\n[]\n[resource]"}}));
}

TEST(McpServer, AListOfToolsEnds) {
  McpServer program(
      {.command = server(R"(n=0; while read -r line; do n=$((n-1)); )"
                         R"(say "\"id\":$n,\"result\":{\"nextCursor\":\"x\"}"; done)")});
  EXPECT_TRUE(support::fails(ErrorKind::kCorrupt, {"MCP server s", "has no end"},
                             [&] { (void)program.list_tools("s"); }));
}

TEST(McpServer, OfAnotherRevisionIsRefused) {
  McpServer program({.command = server("read -r line", "1999-01-01")});
  program.ask(7, {{"name", "f"}, {"arguments", json::object()}, {"session", 1}});
  EXPECT_EQ(one(program).answer.at("error"),
            "the server speaks 1999-01-01 of the Model Context Protocol");
}

}  // namespace mcp_server_test
}  // namespace ferry::trainer
