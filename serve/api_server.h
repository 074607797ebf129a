// The HTTP API: OpenAI's endpoints, vLLM's additions, and control of the engine. One thread parses,
// tokenizes and writes, another one does so with what is large; the engine runs on others
// (EngineFleet).
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "serve/api/served_model.h"
#include "serve/background.h"
#include "serve/engine_fleet.h"
#include "serve/generation.h"
#include "serve/http/http_server.h"
#include "serve/metrics.h"

namespace ferry::serve {

struct ApiOptions {
  std::string version{};                // of the program
  std::vector<std::string> api_keys{};  // empty: anybody may ask
  // Sites whose pages may ask, "*" for all. Empty: all with API keys, none without.
  std::vector<std::string> allowed_origins{};
  std::int64_t max_queued_requests = 4096;  // samples beyond those that the engine runs at a time
  std::chrono::milliseconds request_timeout{0};        // of an answer; 0: none
  std::chrono::milliseconds shutdown_timeout{30'000};  // for answers under way
  // Asked a few times a second; true: take no more requests, answer those under way, and end.
  std::function<bool()> stop_requested{};
};

class ApiServer {
 public:
  // Listens at once; throws as HttpServer does. The engine outlives this.
  ApiServer(ServedModel model, EngineFleet& engine, ServerOptions server, ApiOptions options);

  int port() const { return http_.port(); }
  // Serves until a stop is requested, on the caller's thread.
  void run();
  // Thread-safe: ends run() at once.
  void close() { http_.close(); }

 private:
  using Clock = std::chrono::steady_clock;
  using ExchangePtr = std::shared_ptr<Exchange>;
  struct Route {
    std::string_view method{};
    void (ApiServer::*answer)(const ExchangePtr&) = nullptr;
    bool is_open = false;  // without an API key
  };
  struct Prompt {  // that the engine answers
    std::shared_ptr<Generation> generation{};
    std::size_t index = 0;
  };

  static const std::map<std::string_view, Route>& routes();
  static const Route* route_of(const HttpRequest& request);
  std::optional<HttpResponse> refusal_of(const HttpRequest& request) const;
  HttpHeaders headers_for(const HttpRequest& request) const;
  bool allows(std::string_view origin) const;
  void handle(const ExchangePtr& exchange);
  bool is_authorized(const HttpRequest& request) const;

  // The rest of an answer, on the server's thread.
  using Rest = std::function<void(const ExchangePtr&)>;
  // Parses a body, and answers; large bodies on a thread of their own. `parse` is thread-safe.
  void answer_body(const ExchangePtr& exchange,
                   std::function<Rest(const ordered_json& body)> parse);
  template <typename Answer>
  static void answer_or_refuse(const ExchangePtr& exchange, const Answer& answer);
  Rest generation_of(GenerationRequest request);
  void completions(const ExchangePtr& exchange);
  void chat_completions(const ExchangePtr& exchange);
  void models(const ExchangePtr& exchange);
  void model(const ExchangePtr& exchange);
  ordered_json model_card() const;
  Rest tokens_of(const ordered_json& body) const;
  Rest text_of(const ordered_json& body) const;
  void tokenize(const ExchangePtr& exchange);
  void detokenize(const ExchangePtr& exchange);
  void health(const ExchangePtr& exchange);
  void version(const ExchangePtr& exchange);
  void metrics(const ExchangePtr& exchange);

  // control_endpoints.cc
  void pause(const ExchangePtr& exchange);
  void resume(const ExchangePtr& exchange);
  void is_paused(const ExchangePtr& exchange);
  void update_weights(const ExchangePtr& exchange);
  void reset_prefix_cache(const ExchangePtr& exchange);
  void sleep(const ExchangePtr& exchange);
  void wake_up(const ExchangePtr& exchange);
  void is_sleeping(const ExchangePtr& exchange);
  EngineFleet::Done when_done(const ExchangePtr& exchange);

  void generate(GenerationRequest request, const ExchangePtr& exchange);
  void respond_later(const ExchangePtr& exchange, std::function<std::string()> make_body);
  void take(std::size_t engine,
            std::vector<rollout::RequestOutput> outputs,
            const EngineStatus& status);
  void forget(const Generation& generation);
  void tick();

  ServedModel model_;
  TokenTexts texts_;
  EngineFleet& engine_;
  ApiOptions options_;
  EngineStatus status_{};
  Metrics metrics_;
  std::unordered_map<std::string, Prompt> prompts_;  // by the engine's request
  std::int64_t num_samples_ = 0;                     // under way
  std::mt19937_64 random_;
  Clock::time_point stopped_{};
  bool is_stopping_ = false;
  std::int64_t created_;
  HttpServer http_;
  // They parse and write large bodies, and end before what they use. Small ones of these do not
  // wait for those that take seconds.
  Background background_, huge_bodies_;
};

}  // namespace ferry::serve
