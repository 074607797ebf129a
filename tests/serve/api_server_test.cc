#include "serve/api_server.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>

#include "tests/serve/fake_engine.h"

namespace ferry::serve {
namespace api_server_test {

using fake_engine::FakeEngine;
using fake_engine::token_of;

class ApiServerTest : public testing::Test {
 public:
  ~ApiServerTest() override {
    server_.close();
    thread_.join();
  }

 protected:
  ApiServerTest()
      : loop_(std::vector<EngineSteps*>{&engine_}),
        server_(
            {.name = "m", .root = "m", .max_model_len = 1000, .vocab_size = 100, .max_num_seqs = 4},
            loop_.loop,
            {.port = 0},
            {.max_queued_requests = 2}) {
    loop_.start();
    thread_ = std::thread([this] { server_.run(); });
  }

  // The status and all of a response.
  std::pair<int, std::string> whole(const std::string& method,
                                    const std::string& path,
                                    const std::string& body = "",
                                    const std::string& header = "") {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(server_.port()));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    const auto text = method + " " + path + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" +
                      header + "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
    send(fd, text.data(), text.size(), MSG_NOSIGNAL);
    std::string answer;
    std::array<char, 4096> buffer{};
    for (auto count = recv(fd, buffer.data(), buffer.size(), 0); count > 0;
         count = recv(fd, buffer.data(), buffer.size(), 0))
      answer.append(buffer.data(), static_cast<std::size_t>(count));
    ::close(fd);
    return {std::stoi(answer.substr(9, 3)), answer};
  }
  // The status and the body of a response.
  std::pair<int, std::string> ask(const std::string& method,
                                  const std::string& path,
                                  const std::string& body = "",
                                  const std::string& header = "") {
    const auto [status, answer] = whole(method, path, body, header);
    return {status, answer.substr(answer.find("\r\n\r\n") + 4)};
  }
  ordered_json post(const std::string& path, const ordered_json& body) {
    const auto [status, answer] = ask("POST", path, body.dump());
    EXPECT_EQ(status, 200) << answer;
    return ordered_json::parse(answer);
  }

  FakeEngine engine_;
  fake_engine::Running<EngineFleet> loop_;
  ApiServer server_;
  std::thread thread_;
};

TEST_F(ApiServerTest, TokensInAreTokensOut) {
  const auto answer = post("/v1/completions", {{"prompt", {{1, 2}, {3}}},
                                               {"n", 2},
                                               {"max_tokens", 3},
                                               {"seed", 5},
                                               {"return_token_ids", true}});
  ASSERT_EQ(answer["choices"].size(), 4U);
  const std::vector<std::vector<std::int64_t>> prompts{{1, 2}, {3}};
  for (std::size_t i = 0; i < 4; ++i) {
    const auto& choice = answer["choices"][i];
    const auto& prompt = prompts[i / 2];
    EXPECT_EQ(choice["prompt_token_ids"], prompt);
    for (std::size_t t = 0; t < 3; ++t)
      EXPECT_EQ(choice["token_ids"][t], token_of(prompt, 5, static_cast<std::int64_t>(i % 2),
                                                 static_cast<std::int64_t>(t + 1)));
  }
  EXPECT_EQ(answer["usage"],
            (ordered_json{{"prompt_tokens", 3}, {"completion_tokens", 12}, {"total_tokens", 15}}));
}

TEST_F(ApiServerTest, AStreamEndsAfterItsUsage) {
  const auto [status, answer] = ask(
      "POST", "/v1/chat/completions",
      R"({"prompt_token_ids": [1], "max_tokens": 2, "stream": true, "stream_options": {"include_usage": true}})");
  EXPECT_EQ(status, 200);
  EXPECT_NE(
      answer.find(
          R"("choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3}})"),
      std::string::npos);
  EXPECT_TRUE(answer.ends_with("data: [DONE]\n\n\r\n0\r\n\r\n"));
}

TEST_F(ApiServerTest, ErrorsHaveOpenAisForm) {
  const auto [status, answer] = ask("POST", "/v1/completions", R"({"prompt": [1], "n": "x"})");
  EXPECT_EQ(status, 400);
  EXPECT_EQ(
      answer,
      R"({"error":{"message":"n: is not an integer of 64 bits","type":"invalid_request_error","param":"n","code":null}})");
  EXPECT_EQ(ask("GET", "/nowhere").first, 404);
  EXPECT_EQ(ask("GET", "/v1/completions").first, 405);
}

TEST_F(ApiServerTest, NamesTheMethodsOfAPath) {
  const auto [status, shown] = whole("OPTIONS", "/v1/models");
  EXPECT_EQ(status, 200);
  EXPECT_NE(shown.find("Allow: GET, HEAD, OPTIONS\r\n"), std::string::npos) << shown;
  EXPECT_NE(whole("DELETE", "/pause").second.find("Allow: POST, OPTIONS\r\n"), std::string::npos);
  const auto head = whole("HEAD", "/v1/models"), get = whole("GET", "/v1/models");
  EXPECT_EQ(head.first, 200);
  EXPECT_EQ(head.second, get.second.substr(0, get.second.find("\r\n\r\n") + 4));
  EXPECT_EQ(whole("HEAD", "/v1/completions").first, 405);
}

TEST_F(ApiServerTest, APageOfAnotherSiteMayNotAsk) {
  EXPECT_EQ(ask("POST", "/pause", "", "Origin: http://example.com\r\n").first, 403);
  EXPECT_EQ(ask("GET", "/is_paused").second, R"({"is_paused":false})");
}

TEST_F(ApiServerTest, AnEngineThatFailsIsAnError500) {
  engine_.fails = true;
  const auto [status, answer] = ask("POST", "/v1/completions", R"({"prompt": [1]})");
  EXPECT_EQ(status, 500);
  EXPECT_NE(answer.find("the device is lost"), std::string::npos);
}

TEST_F(ApiServerTest, CountsWhatItAnswers) {
  post("/v1/completions", {{"prompt", {1, 2}}, {"max_tokens", 3}});
  const auto metrics = ask("GET", "/metrics").second;
  for (const char* line :
       {"vllm:prompt_tokens_total{engine=\"0\",model_name=\"m\"} 2\n",
        "vllm:generation_tokens_total{engine=\"0\",model_name=\"m\"} 3\n",
        "vllm:time_to_first_token_seconds_count{engine=\"0\",model_name=\"m\"} 1\n",
        "vllm:request_generation_tokens_sum{engine=\"0\",model_name=\"m\"} 3\n",
        ",finished_reason=\"length\"} 1\n"})
    EXPECT_NE(metrics.find(line), std::string::npos) << line << metrics;
}

TEST_F(ApiServerTest, WeightsAreUpdatedOverHttp) {
  EXPECT_EQ(ask("POST", "/update_weights", R"({"checkpoint": "absent"})").first, 400);
  EXPECT_EQ(ask("POST", "/update_weights", R"({"checkpoint": "x", "mode": "never"})").first, 400);
  post("/update_weights", {{"checkpoint", "x"}});
  const auto answer =
      post("/v1/completions", {{"prompt", {1}}, {"max_tokens", 1}, {"return_token_ids", true}});
  EXPECT_GE(answer["choices"][0]["token_ids"][0].get<int>(), 1000);
  EXPECT_EQ(answer["system_fingerprint"], "weights-1");
}

TEST_F(ApiServerTest, PausesAndSleepsOverHttp) {
  post("/pause?mode=keep", {});
  EXPECT_EQ(ask("GET", "/is_paused").second, R"({"is_paused":true})");
  post("/resume", {});
  EXPECT_EQ(ask("GET", "/is_paused").second, R"({"is_paused":false})");
  EXPECT_EQ(ask("POST", "/sleep?level=3").first, 400);
  post("/sleep?level=1", {});
  EXPECT_EQ(ask("GET", "/is_sleeping").second, R"({"is_sleeping":true})");
  post("/wake_up", {});
  EXPECT_EQ(engine_.sleeps, 0);
}

}  // namespace api_server_test
}  // namespace ferry::serve
