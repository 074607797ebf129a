// The program is a shell that writes its line down and ends the session when the test says so; the
// test asks in its place.
#include "trainer/agents/session_program.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <future>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "distckpt/base/json.h"
#include "distckpt/storage/file_io.h"
#include "distckpt/storage/network/http.h"
#include "tests/support/temp_dir.h"

namespace ferry::trainer {
namespace session_program_test {

using distckpt::HttpResponse;
using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr std::int64_t kSession = 812;
constexpr const char* kChat = "/chat/completions";

class SessionProgramTest : public testing::Test {
 protected:
  // Begins the session with question 1.
  void SetUp() override {
    program_.ask(1, {{"method", "run"}, {"session", kSession}, {"prompt", "p"}});
    const auto until = steady_clock::now() + std::chrono::seconds(20);
    std::string text;
    while (!text.ends_with('\n') && steady_clock::now() < until) {
      EXPECT_TRUE(program_.answers(milliseconds(10)).empty());
      if (std::filesystem::exists(dir_ / "lines")) text = distckpt::read_text(dir_ / "lines");
    }
    line_ = distckpt::parse_json(text, "the program's line");
  }

  HttpResponse request(const std::string& path,
                       const std::string& body,
                       const std::string& method = "POST",
                       std::optional<std::string> key = {}) const {
    const auto bearer = "Authorization: Bearer " + key.value_or(line_.value("api_key", ""));
    return distckpt::http_try({.method = method,
                               .url = line_.value("base_url", "") + path,
                               .headers = {bearer, "Content-Type: application/json"},
                               .body = std::as_bytes(std::span(body)),
                               .timeout = std::chrono::seconds(20),
                               .once = true})
        .response;
  }
  std::future<HttpResponse> request_later(const std::string& body) const {
    return std::async(std::launch::async, [=, this] { return request(kChat, body); });
  }
  // The answer to the only question that is open.
  AgentAnswer answer() {
    const auto until = steady_clock::now() + std::chrono::seconds(20);
    while (steady_clock::now() < until) {
      auto found = program_.answers(milliseconds(50));
      if (found.empty()) continue;
      EXPECT_EQ(found.size(), 1U);
      return std::move(found.front());
    }
    ADD_FAILURE() << "no answer";
    return {};
  }
  // The model's response is question `id`.
  void respond(std::int64_t id, const std::string& body, int status = 200) {
    program_.ask(id, {{"method", "respond"},
                      {"session", kSession},
                      {"status", status},
                      {"body", body},
                      {"type", "application/json"}});
  }
  void end(const std::string& line) const {
    distckpt::write_text(dir_ / "end.part", line + "\n");
    std::filesystem::rename(dir_ / "end.part", dir_ / "end");
  }

  support::TempDir dir_;
  SessionProgram program_{
      {.command = fmt::format(
           "read -r line; echo \"$line\" > {0}/lines; while [ ! -e {0}/end ]; do sleep 0.01; done; "
           "cat {0}/end; read -r line",
           dir_.path().string()),
       .timeout = std::chrono::seconds(2),
       .keeps_sessions = true}};
  json line_;
};

TEST_F(SessionProgramTest, TellsTheProgramWhereItsSessionIs) {
  EXPECT_EQ(line_.at("id"), 1);
  EXPECT_EQ(line_.at("prompt"), "p");
  EXPECT_FALSE(line_.contains("method"));
  const auto url = line_.at("base_url").get<std::string>();
  EXPECT_TRUE(url.starts_with("http://127.0.0.1:")) << url;
  EXPECT_TRUE(url.ends_with("/sessions/812/v1")) << url;
}

TEST_F(SessionProgramTest, ARequestIsTheAnswerAndTheNextQuestionItsResponse) {
  auto response = request_later(R"({"messages": []})");
  const auto asked = answer();
  EXPECT_EQ(asked.id, 1);
  EXPECT_EQ(asked.answer, (json{{"path", kChat}, {"request", R"({"messages": []})"}}));
  respond(2, R"({"choices": [1]})", 201);
  const auto got = response.get();
  EXPECT_EQ(got.status, 201);
  EXPECT_EQ(got.body, R"({"choices": [1]})");
}

TEST_F(SessionProgramTest, TheLastLineIsTheAnswerToTheQuestionThatIsOpen) {
  auto response = request_later("{}");
  answer();
  respond(2, "{}");
  response.get();
  end(R"({"id": 1, "reward_score": 0.5})");
  const auto last = answer();
  EXPECT_EQ(last.id, 2);
  EXPECT_EQ(last.answer, (json{{"reward_score", 0.5}}));
}

// Its client gave up: the session ends when the model has answered.
TEST_F(SessionProgramTest, AProgramMayEndItsSessionWhileTheModelAnswers) {
  auto response = request_later("{}");
  answer();
  end(R"({"id": 1, "reward_score": 0.5})");
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(program_.answers(milliseconds(0)).empty());
    std::this_thread::sleep_for(milliseconds(10));
  }
  respond(2, "{}");
  const auto last = answer();
  EXPECT_EQ(last.id, 2);
  EXPECT_EQ(last.answer, (json{{"reward_score", 0.5}}));
  EXPECT_EQ(response.get().status, 200);
  EXPECT_EQ(request(kChat, R"({"more": 1})").status, 404);
}

TEST_F(SessionProgramTest, ASessionWhoseTimeIsOverIsRefusedAndItsEndIsPassedOver) {
  EXPECT_EQ(answer().answer, (json{{"error", "no answer within 2 s"}, {"timed_out", true}}));
  EXPECT_EQ(request(kChat, "{}").status, 404);
  program_.ask(2, {{"method", "run"}, {"session", kSession + 1}, {"prompt", "p"}});
  end(R"({"id": 1, "reward": 1})");
  // The shell has read the line of the second session, and leaves.
  EXPECT_EQ(answer().answer, (json{{"error", "the program ended (exit status 0)"}}));
}

TEST_F(SessionProgramTest, AClientThatAsksAgainGetsTheSameResponse) {
  auto response = request_later("{}");
  answer();
  respond(2, R"({"n": 1})");
  response.get();
  EXPECT_EQ(request(kChat, "{}").body, R"({"n": 1})");
  EXPECT_TRUE(program_.answers(milliseconds(0)).empty());
}

TEST_F(SessionProgramTest, RefusesASecondRequestWhileTheModelAnswers) {
  auto response = request_later("{}");
  answer();
  EXPECT_EQ(request(kChat, R"({"other": 1})").status, 400);
  respond(2, "{}");
  EXPECT_EQ(response.get().status, 200);
}

TEST_F(SessionProgramTest, RefusesAWrongKey) {
  EXPECT_EQ(request(kChat, "{}", "POST", "guessed").status, 401);
}

TEST_F(SessionProgramTest, RefusesAnotherPath) {
  EXPECT_EQ(request("/embeddings", "{}").status, 404);
}

TEST_F(SessionProgramTest, RefusesASessionThatIsNotUnderWay) {
  auto& url = line_.at("base_url").get_ref<std::string&>();
  url.replace(url.find("/812/"), 5, "/813/");
  EXPECT_EQ(request(kChat, "{}").status, 404);
}

TEST_F(SessionProgramTest, RefusesAnotherMethod) {
  EXPECT_EQ(request(kChat, "", "GET").status, 405);
}

TEST_F(SessionProgramTest, RefusesABodyThatIsNoObject) {
  EXPECT_EQ(request(kChat, "[1").status, 400);
}

TEST_F(SessionProgramTest, ALineOfAnotherSessionEndsTheProgramWithAnError) {
  end(R"({"id": 99})");
  const auto found = answer();
  EXPECT_EQ(found.id, 1);
  const auto error = found.answer.value("error", "");
  EXPECT_NE(error.find("ended a session that is not under way"), std::string::npos) << error;
}

TEST_F(SessionProgramTest, ALineThatIsNoObjectIsAnError) {
  end("done");
  EXPECT_TRUE(answer().answer.contains("error"));
}

}  // namespace session_program_test
}  // namespace ferry::trainer
