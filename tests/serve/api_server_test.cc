#include "serve/api_server.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

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
  explicit ApiServerTest(ApiOptions options = {})
      : loop_(std::vector<EngineSteps*>{&engine_}),
        server_({.name = "m",
                 .root = "m",
                 .max_model_len = 100'000,
                 .vocab_size = 100,
                 .max_num_seqs = 4},
                loop_.loop,
                {.port = 0},
                with_short_queue(std::move(options))) {
    loop_.start();
    thread_ = std::thread([this] { server_.run(); });
  }

  static ApiOptions with_short_queue(ApiOptions options) {
    options.max_queued_requests = 2;
    return options;
  }

  // All that the server sends until it closes the connection.
  std::string sent_for(const std::string& text) const {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(server_.port()));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    send(fd, text.data(), text.size(), MSG_NOSIGNAL);
    std::string answer;
    std::array<char, 4096> buffer{};
    for (auto count = recv(fd, buffer.data(), buffer.size(), 0); count > 0;
         count = recv(fd, buffer.data(), buffer.size(), 0))
      answer.append(buffer.data(), static_cast<std::size_t>(count));
    ::close(fd);
    return answer;
  }
  // The status and all of a response.
  std::pair<int, std::string> whole(const std::string& method,
                                    const std::string& path,
                                    const std::string& body = "",
                                    const std::string& header = "") {
    const auto answer =
        sent_for(method + " " + path + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + header +
                 "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body);
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

  // Each is a metric's name without vllm:, its labels but for those that all have, and its value.
  void expect_metrics(const std::vector<std::string>& expected) {
    const auto metrics = ask("GET", "/metrics").second;
    for (const auto& one : expected) {
      const auto value = one.find(' '), labels = std::min(value, one.find(','));
      const auto line = "vllm:" + one.substr(0, labels) + "{engine=\"0\",model_name=\"m\"" +
                        one.substr(labels, value - labels) + "}" + one.substr(value) + "\n";
      EXPECT_NE(metrics.find(line), std::string::npos) << line << metrics;
    }
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
  EXPECT_EQ(answer["usage"], (ordered_json{{"prompt_tokens", 3},
                                           {"completion_tokens", 12},
                                           {"total_tokens", 15},
                                           {"prompt_tokens_details", {{"cached_tokens", 0}}}}));
}

TEST_F(ApiServerTest, ALongAnswerHoldsUpNobody) {
  using Clock = std::chrono::steady_clock;
  const std::vector<std::int64_t> prompt(30'000, 70);
  const ordered_json body{{"prompt", prompt}, {"max_tokens", 1}, {"prompt_logprobs", 10}};
  std::atomic<bool> is_over = false;
  std::pair<int, std::string> answer;
  const auto asked = Clock::now();
  std::thread client([&] {
    answer = ask("POST", "/v1/completions", body.dump());
    is_over = true;
  });
  Clock::duration longest{0};
  while (!is_over) {
    const auto begin = Clock::now();
    EXPECT_EQ(ask("GET", "/health").first, 200);
    longest = std::max(longest, Clock::now() - begin);
  }
  client.join();
  EXPECT_EQ(answer.first, 200);
  EXPECT_GT(answer.second.size(), std::size_t{10} << 20);
  EXPECT_LT(longest, (Clock::now() - asked) / 2);  // others use the machine, too
}

TEST_F(ApiServerTest, AStreamEndsAfterItsUsage) {
  const auto [status, answer] = ask(
      "POST", "/v1/chat/completions",
      R"({"prompt_token_ids": [1], "max_tokens": 2, "stream": true, "stream_options": {"include_usage": true}})");
  EXPECT_EQ(status, 200);
  EXPECT_NE(
      answer.find(
          R"("choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3,"prompt_tokens_details":{"cached_tokens":0}}})"),
      std::string::npos);
  EXPECT_TRUE(answer.ends_with("data: [DONE]\n\n\r\n0\r\n\r\n"));
}

// The JSON of a stream's events.
std::vector<ordered_json> events_of(const std::string& answer) {
  std::vector<ordered_json> events;
  for (std::size_t at = 0; (at = answer.find("data: {", at)) != std::string::npos; ++at)
    events.push_back(ordered_json::parse(answer.substr(at + 6, answer.find('\n', at) - at - 6)));
  return events;
}

TEST_F(ApiServerTest, APartOfAStreamNamesTheWeights) {
  post("/update_weights", {{"checkpoint", "x"}});
  const auto events = events_of(
      ask("POST", "/v1/chat/completions",
          R"({"prompt_token_ids": [1], "max_tokens": 2, "stream": true, "logprobs": true})")
          .second);
  ASSERT_EQ(events.size(), 3U);
  for (const auto& event : events) EXPECT_EQ(event["system_fingerprint"], "weights-1") << event;
}

TEST_F(ApiServerTest, APartOfAStreamHasTheUsageOfItsOwnChoice) {
  const auto events = events_of(
      ask("POST", "/v1/completions",
          R"({"prompt": [[1, 2, 3], [4]], "max_tokens": 2, "n": 2, "stream": true, "return_token_ids": true,
              "stream_options": {"include_usage": true, "continuous_usage_stats": true}})")
          .second);
  std::vector<int> drawn(4, 0);
  for (const auto& event : events) {
    if (event["choices"].empty()) continue;
    const auto& choice = event["choices"][0];
    const auto index = choice["index"].get<std::size_t>();
    drawn[index] += static_cast<int>(choice["token_ids"].size());
    EXPECT_EQ(event["usage"]["prompt_tokens"], index < 2 ? 3 : 1) << event;
    EXPECT_EQ(event["usage"]["completion_tokens"], drawn[index]) << event;
  }
  EXPECT_EQ(drawn, std::vector<int>(4, 2));
  EXPECT_EQ(events.back()["usage"]["completion_tokens"], 8);
  const auto chat = events_of(ask("POST", "/v1/chat/completions",
                                  R"({"prompt_token_ids": [1, 2], "max_tokens": 1, "stream": true,
              "stream_options": {"continuous_usage_stats": true}})")
                                  .second);
  EXPECT_EQ(chat.front()["usage"],
            (ordered_json{{"prompt_tokens", 2},
                          {"completion_tokens", 0},
                          {"total_tokens", 2},
                          {"prompt_tokens_details", {{"cached_tokens", 0}}}}));
}

TEST_F(ApiServerTest, OnlyAStopThatTheRequestAskedForIsAReason) {
  engine_.stop_token = token_of({1}, 5, 0, 2);
  ordered_json body{{"prompt", {1}}, {"seed", 5}, {"max_tokens", 9}};
  const auto by_model = post("/v1/completions", body)["choices"][0];
  EXPECT_EQ(by_model["finish_reason"], "stop");
  EXPECT_EQ(by_model["stop_reason"], nullptr);
  body["stop_token_ids"] = {engine_.stop_token};
  EXPECT_EQ(post("/v1/completions", body)["choices"][0]["stop_reason"], engine_.stop_token);
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
  EXPECT_NE(whole("OPTIONS", "*").second.find("Allow: GET, HEAD, POST, OPTIONS\r\n"),
            std::string::npos);
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

class KeyedServerTest : public ApiServerTest {
 protected:
  KeyedServerTest() : ApiServerTest({.api_keys = {"secret"}}) {}
};

// The client waits for "100 Continue", and another one sends a part of its body.
TEST_F(KeyedServerTest, AsksForTheKeyBeforeTheBodyComes) {
  const std::string head =
      "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 30000000\r\n";
  for (const auto& text : {head + "Expect: 100-continue\r\n\r\n", head + "\r\n{\"prompt\": \""}) {
    const auto answer = sent_for(text);
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 401 ")) << answer;
    EXPECT_NE(answer.find("Connection: close\r\n"), std::string::npos);
  }
  EXPECT_TRUE(sent_for("PUT /health HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
                  .starts_with("HTTP/1.1 405 "));
}

TEST_F(KeyedServerTest, ABrowserMayAskForAPageWithTheKey) {
  const std::string origin = "Origin: https://example.com\r\n";
  const auto before =
      whole("OPTIONS", "/v1/completions", "",
            origin +
                "Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: "
                "authorization,x-stainless-os\r\n");
  EXPECT_EQ(before.first, 200);
  for (const char* line : {"Access-Control-Allow-Origin: *\r\n",
                           "Access-Control-Allow-Methods: GET, HEAD, POST, OPTIONS\r\n",
                           "Access-Control-Allow-Headers: authorization,x-stainless-os\r\n"})
    EXPECT_NE(before.second.find(line), std::string::npos) << before.second;
  const std::string key = "Authorization: Bearer secret\r\n";
  for (const auto& [headers, status] : {std::pair(origin, 401), std::pair(origin + key, 200)}) {
    const auto answer = whole("POST", "/v1/completions", R"({"prompt": [1]})", headers);
    EXPECT_EQ(answer.first, status);
    EXPECT_NE(answer.second.find("Access-Control-Allow-Origin: *\r\n"), std::string::npos);
  }
  EXPECT_EQ(whole("GET", "/health").second.find("Access-Control"), std::string::npos);
}

class PagesServerTest : public ApiServerTest {
 protected:
  PagesServerTest() : ApiServerTest({.allowed_origins = {"https://example.com"}}) {}
};

TEST_F(PagesServerTest, PagesOfTheSitesThatAreNamedMayAsk) {
  const auto answer = whole("GET", "/v1/models", "", "Origin: https://example.com\r\n");
  EXPECT_EQ(answer.first, 200);
  EXPECT_NE(answer.second.find("Access-Control-Allow-Origin: https://example.com\r\nVary: Origin"),
            std::string::npos)
      << answer.second;
  EXPECT_EQ(ask("GET", "/v1/models", "", "Origin: https://other.com\r\n").first, 403);
}

TEST_F(ApiServerTest, ABodyThatIsCompressedIsRefused) {
  const std::string body = R"({"prompt": [1]})";
  EXPECT_EQ(ask("POST", "/v1/completions", body, "Content-Encoding: gzip\r\n").first, 415);
  EXPECT_EQ(ask("POST", "/v1/completions", body, "Content-Encoding: identity\r\n").first, 200);
}

TEST_F(ApiServerTest, ModelsWithoutANameAreListed) {
  EXPECT_EQ(ask("GET", "/v1/models/"), ask("GET", "/v1/models"));
}

TEST_F(ApiServerTest, AnEngineThatFailsIsAnError500) {
  engine_.fails = true;
  const auto [status, answer] = ask("POST", "/v1/completions", R"({"prompt": [1]})");
  EXPECT_EQ(status, 500);
  EXPECT_NE(answer.find("the device is lost"), std::string::npos);
}

TEST_F(ApiServerTest, CountsWhatItAnswers) {
  post("/v1/completions", {{"prompt", {1, 2}}, {"max_tokens", 3}});
  expect_metrics({"prompt_tokens_total 2", "generation_tokens_total 3",
                  "time_to_first_token_seconds_count 1", "request_generation_tokens_sum 3",
                  "request_success_total,finished_reason=\"length\" 1"});
}

TEST_F(ApiServerTest, CountsEachAnswerOfARequest) {
  post("/v1/completions", {{"prompt", {{1, 2}, {3}}}, {"n", 2}, {"max_tokens", 3}});
  expect_metrics({"prompt_tokens_total 3", "time_to_first_token_seconds_count 4",
                  "e2e_request_latency_seconds_count 4", "request_prompt_tokens_sum 6",
                  "request_generation_tokens_bucket,le=\"5\" 4",
                  "request_decode_time_seconds_count 4", "request_params_n_bucket,le=\"1\" 0"});
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
