// Endpoints of ApiServer that control the engine: vLLM's paths and options.
#include <fmt/format.h>

#include <algorithm>
#include <climits>

#include "serve/api/fields.h"
#include "serve/api_server.h"

namespace ferry::serve {
namespace {

PauseMode mode_of(const std::string& name, PauseMode otherwise) {
  if (name.empty()) return otherwise;
  if (name == "wait") return PauseMode::kWait;
  if (name == "keep") return PauseMode::kKeep;
  if (name == "abort") return PauseMode::kAbort;
  throw ApiError(400, fmt::format("mode: {} is not wait, keep or abort", name), "mode");
}

// No file has such a name: the client is wrong, not the server.
void check_path(const Fields& fields, const char* name, const std::string& path) {
  if (path.size() >= PATH_MAX) fields.refuse(name, "is longer than a path may be");
  if (path.find('\0') != std::string::npos) fields.refuse(name, "has a zero byte");
  for (std::size_t begin = 0; begin < path.size();) {
    const auto end = std::min(path.find('/', begin), path.size());
    if (end - begin > NAME_MAX) fields.refuse(name, "has a name that is longer than one may be");
    begin = end + 1;
  }
}

}  // namespace

// Answers the request when the engine has done a command.
EngineFleet::Done ApiServer::when_done(const ExchangePtr& exchange) {
  return [this, exchange](const std::optional<Error>& error) {
    http_.post([exchange, error] {
      if (!error) return exchange->respond({.body = R"({"status":"ok"})"});
      const auto shown = api_error(*error);
      exchange->respond({.status = shown.status(), .body = shown.body()});
    });
  };
}

void ApiServer::pause(const ExchangePtr& exchange) {
  const auto mode = mode_of(exchange->request().query_value("mode"), PauseMode::kAbort);
  engine_.pause(mode, when_done(exchange));
}

void ApiServer::resume(const ExchangePtr& exchange) {
  engine_.resume(when_done(exchange));
}

void ApiServer::is_paused(const ExchangePtr& exchange) {
  exchange->respond({.body = dump({{"is_paused", status_.is_paused}})});
}

void ApiServer::update_weights(const ExchangePtr& exchange) {
  const auto body = parse_object(exchange->request().body);
  const Fields fields(body);
  WeightSource source;
  std::string mode;
  fields.read("checkpoint", source.checkpoint);
  fields.read("iteration", source.iteration);
  fields.read("delta", source.delta);
  fields.read("mode", mode);
  if (source.checkpoint.empty() && source.delta.empty())
    fields.refuse("checkpoint", "is missing, and so is delta");
  check_path(fields, "checkpoint", source.checkpoint);
  check_path(fields, "delta", source.delta);
  check_path(fields, "iteration", source.iteration);
  engine_.update_weights(std::move(source), mode_of(mode, PauseMode::kWait), when_done(exchange));
}

void ApiServer::reset_prefix_cache(const ExchangePtr& exchange) {
  engine_.reset_prefix_cache(when_done(exchange));
}

void ApiServer::sleep(const ExchangePtr& exchange) {
  const auto& request = exchange->request();
  auto text = request.query_value("level");
  if (text.empty()) text = "1";
  if (text != "1" && text != "2")
    throw ApiError(400, fmt::format("level: {} is not 1 or 2", text), "level");
  engine_.sleep(text[0] - '0', mode_of(request.query_value("mode"), PauseMode::kAbort),
                when_done(exchange));
}

void ApiServer::wake_up(const ExchangePtr& exchange) {
  engine_.wake_up(when_done(exchange));
}

void ApiServer::is_sleeping(const ExchangePtr& exchange) {
  exchange->respond({.body = dump({{"is_sleeping", status_.is_sleeping}})});
}

}  // namespace ferry::serve
