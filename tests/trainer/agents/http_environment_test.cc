#include "trainer/agents/http_environment.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <string>

#include "distckpt/base/json.h"
#include "tests/support/remote/stub_server.h"
#include "tests/trainer/agents/program_answers.h"

namespace ferry::trainer {
namespace http_environment_test {

using nlohmann::json;
using std::chrono::milliseconds;
using support::stub_answer;
using support::StubRequest;
using support::StubServer;

// The answer to one question to a server that answers that.
json answer_of(const StubServer::Answer& answer, milliseconds timeout = std::chrono::seconds(20)) {
  const StubServer server(answer);
  HttpEnvironment environment({.command = server.url(), .timeout = timeout});
  environment.ask(1, {{"method", "step"}});
  const auto found = all_answers(environment, 1);
  return found.size() == 1 ? found.front().answer : json();
}

TEST(HttpEnvironment, PostsAQuestionToTheUrlOfItsMethod) {
  const StubServer server(
      [](const StubRequest&) { return stub_answer(200, R"({"observation": "o"})"); });
  HttpEnvironment environment({.command = server.url() + "/env//"});
  environment.ask(7, {{"method", "reset"}, {"seed", 3}});
  const auto found = all_answers(environment, 1);
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].id, 7);
  EXPECT_EQ(found[0].answer, (json{{"observation", "o"}}));
  const auto requests = server.requests();
  ASSERT_EQ(requests.size(), 1U);
  EXPECT_EQ(requests[0].method, "POST");
  EXPECT_EQ(requests[0].target, "/env/reset");
  EXPECT_EQ(requests[0].header("content-type"), "application/json");
  EXPECT_EQ(distckpt::parse_json(requests[0].body, "body"), (json{{"seed", 3}}));
}

TEST(HttpEnvironment, AnswersEachOfManyQuestions) {
  const StubServer server(
      [](const StubRequest& request) { return stub_answer(200, request.body); });
  HttpEnvironment environment({.command = server.url()});
  for (std::int64_t id = 0; id < 20; ++id) environment.ask(id, {{"method", "step"}, {"n", id}});
  const auto found = all_answers(environment, 20);
  ASSERT_EQ(found.size(), 20U);
  for (const auto& one : found) EXPECT_EQ(one.answer, (json{{"n", one.id}}));
  EXPECT_EQ(server.requests().size(), 20U);
}

TEST(HttpEnvironment, AnErrorIsAnAnswerThatNamesTheUrl) {
  const auto answer = answer_of([](const StubRequest&) { return stub_answer(500, "broken"); });
  const auto error = answer.value("error", "");
  EXPECT_NE(error.find("/step: "), std::string::npos) << answer;
  EXPECT_NE(error.find("500"), std::string::npos) << answer;
}

TEST(HttpEnvironment, AsksABusyServerOnlyOnce) {
  const StubServer server([](const StubRequest&) { return stub_answer(503); });
  HttpEnvironment environment({.command = server.url()});
  environment.ask(1, {{"method", "step"}});
  const auto found = all_answers(environment, 1);
  ASSERT_EQ(found.size(), 1U);
  EXPECT_TRUE(found[0].answer.contains("error")) << found[0].answer;
  EXPECT_EQ(server.requests().size(), 1U);
}

TEST(HttpEnvironment, RefusesAnAnswerThatIsNoObject) {
  for (const auto* body : {"", "[1]", "{\"a\": ", "null"}) {
    const auto answer = answer_of([&](const StubRequest&) { return stub_answer(200, body); });
    EXPECT_TRUE(answer.contains("error")) << body << " -> " << answer;
  }
}

TEST(HttpEnvironment, SaysThatAConnectionBrokeOff) {
  EXPECT_TRUE(answer_of([](const StubRequest&) { return ""; }).contains("error"));
}

TEST(HttpEnvironment, GoesOnAfterAnError) {
  int asked = 0;
  const StubServer server(
      [&](const StubRequest&) { return asked++ == 0 ? stub_answer(500) : stub_answer(200, "{}"); });
  HttpEnvironment environment({.command = server.url()});
  environment.ask(1, {{"method", "step"}});
  ASSERT_EQ(all_answers(environment, 1).size(), 1U);
  environment.ask(2, {{"method", "step"}});
  const auto found = all_answers(environment, 1);
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].answer, json::object());
}

TEST(HttpEnvironment, SendsNoticesThatAreLeftWhenItEnds) {
  const StubServer server([](const StubRequest&) { return stub_answer(200, "{}"); });
  {
    HttpEnvironment environment({.command = server.url()});
    environment.tell({{"method", "close"}, {"session", 5}});
  }
  const auto requests = server.requests();
  ASSERT_EQ(requests.size(), 1U);
  EXPECT_EQ(requests[0].target, "/close");
  EXPECT_EQ(distckpt::parse_json(requests[0].body, "body"), (json{{"session", 5}}));
}

TEST(HttpEnvironment, ANoticeHasNoAnswer) {
  const StubServer server([](const StubRequest&) { return stub_answer(200, "{}"); });
  HttpEnvironment environment({.command = server.url()});
  environment.tell({{"method", "close"}});
  EXPECT_TRUE(environment.answers(milliseconds(200)).empty());
}

TEST(HttpEnvironment, EndsWithoutWaitingForAnswers) {
  const StubServer server([](const StubRequest&) { return stub_answer(200, "{}"); });
  const auto begin = std::chrono::steady_clock::now();
  {
    HttpEnvironment environment({.command = server.url()});
    for (std::int64_t id = 0; id < 200; ++id) environment.ask(id, {{"method", "step"}});
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
}

}  // namespace http_environment_test
}  // namespace ferry::trainer
