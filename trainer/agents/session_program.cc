#include "trainer/agents/session_program.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <optional>
#include <random>
#include <string_view>
#include <utility>

#include "distckpt/base/error.h"
#include "serve/api/api_error.h"
#include "serve/api/fields.h"

namespace ferry::trainer {

using nlohmann::json;
using serve::ApiError;
using serve::HttpResponse;

namespace {

constexpr std::string_view kFolder = "/sessions/";

std::string random_key() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", random(), random(), random(), random());
}

struct Endpoint {
  std::uint64_t session = 0;
  std::string_view path{};  // behind /v1
};

// "/sessions/812/v1/chat/completions"
std::optional<Endpoint> endpoint_of(std::string_view path) {
  if (!path.starts_with(kFolder)) return std::nullopt;
  path.remove_prefix(kFolder.size());
  Endpoint endpoint;
  const auto [end, error] =
      std::from_chars(path.data(), path.data() + path.size(), endpoint.session);
  path.remove_prefix(static_cast<std::size_t>(end - path.data()));
  if (error != std::errc() || !path.starts_with("/v1/")) return std::nullopt;
  endpoint.path = path.substr(3);
  return endpoint;
}

}  // namespace

SessionProgram::SessionProgram(AgentProgramOptions options)
    : AgentProgram(std::move(options)), api_key_(random_key()) {}

SessionProgram::~SessionProgram() {
  if (!http_) return;
  http_->close();
  thread_.join();
}

void SessionProgram::begin() {
  const std::lock_guard lock(mutex_);
  sessions_.clear();
  if (http_) return;
  http_ = std::make_unique<serve::HttpServer>(
      serve::ServerOptions{.port = 0}, [this](const ExchangePtr& exchange) { handle(exchange); },
      [](int status, const std::string& message) { return ApiError(status, message).body(); });
  thread_ = std::jthread([this] { http_->run(); });
}

void SessionProgram::handle(const ExchangePtr& exchange) {
  HttpResponse response;
  try {
    response = take(exchange);
  } catch (const ApiError& error) {
    response = {.status = error.status(), .body = error.body()};
  }
  if (response.status != 0) exchange->respond(response);
}

// Returns a response with status 0 if the model has to answer first.
HttpResponse SessionProgram::take(const ExchangePtr& exchange) {
  const auto& request = exchange->request();
  if (!request.has_bearer(api_key_))
    throw ApiError(401, "the API key is missing or wrong", "", "invalid_api_key");
  const auto endpoint = endpoint_of(request.path);
  const bool is_known =
      endpoint && (endpoint->path == "/chat/completions" || endpoint->path == "/completions");
  if (!is_known)
    throw ApiError(404, fmt::format("there is no {}", request.path), "", "unknown_url");
  if (request.method != "POST")
    throw ApiError(405, fmt::format("{} is asked by POST", request.path));
  (void)serve::parse_object(request.body);  // throws
  const std::lock_guard lock(mutex_);
  const auto found = sessions_.find(endpoint->session);
  if (found == sessions_.end())
    throw ApiError(404, fmt::format("session {} is not under way", endpoint->session));
  auto& session = found->second;
  Asked asked{.path = std::string(endpoint->path), .body = request.body};
  // A client that has lost its connection asks again, and gets the same answer.
  if (asked == session.asked) {
    session.exchange = exchange;
    return session.response;
  }
  if (session.open < 0)
    throw ApiError(400,
                   "another request of this session is under way: its turns follow each other");
  requests_.push_back({session.open, {{"path", asked.path}, {"request", asked.body}}});
  session.open = -1;
  session.asked = std::move(asked);
  session.exchange = exchange;
  session.response = {.status = 0};
  arrived_.notify_one();
  return session.response;
}

void SessionProgram::put(std::int64_t id, json question) {
  const auto seed = question.at("session").get<std::uint64_t>();
  const std::lock_guard lock(mutex_);
  if (question.at("method") == "run") {
    sessions_[seed] = {.line = id, .open = id};
    question.erase("method");
    question["id"] = id;
    question["base_url"] = fmt::format("http://127.0.0.1:{}{}{}/v1", http_->port(), kFolder, seed);
    question["api_key"] = api_key_;
    return send(question);
  }
  const auto found = sessions_.find(seed);
  if (found == sessions_.end()) {
    requests_.push_back({id, {{"error", "the program was started anew within the session"}}});
    return;
  }
  auto& session = found->second;
  session.open = id;
  session.response = {.status = question.at("status"),
                      .body = question.at("body"),
                      .content_type = question.at("type")};
  http_->post(
      [exchange = session.exchange, response = session.response] { exchange->respond(response); });
  if (session.end.is_null()) return;
  requests_.push_back({id, std::move(session.end)});
  sessions_.erase(found);
}

void SessionProgram::hear(const std::string& line, std::vector<AgentAnswer>& answers) {
  auto said = parse_answer(line);
  require(said.contains("id"), ErrorKind::kCorrupt,
          "the program wrote a line that is no object with the id of a session's line");
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find_if(
      sessions_, [&](const auto& one) { return said["id"] == one.second.line; });
  if (said["id"].is_number_integer() && is_late(said["id"].get<std::int64_t>())) return;
  require(found != sessions_.end(), ErrorKind::kCorrupt,
          "the program ended a session that is not under way");
  require(found->second.end.is_null(), ErrorKind::kCorrupt, "the program ended a session twice");
  for (const char* key : {"id", "request"}) said.erase(key);
  const auto id = found->second.open;
  if (id < 0) {  // its client gave up while the model answers
    found->second.end = std::move(said);
    return;
  }
  sessions_.erase(found);
  close(id);
  answers.push_back({id, std::move(said)});
}

// The session is over for the program, too: its requests are refused, and its end is passed over.
void SessionProgram::timed_out(std::int64_t id) {
  const std::lock_guard lock(mutex_);
  const auto found =
      std::ranges::find_if(sessions_, [&](const auto& one) { return one.second.open == id; });
  if (found == sessions_.end()) return;
  expect_late(found->second.line);
  sessions_.erase(found);
}

// The program's lines are looked for every few milliseconds, its requests wake this.
std::vector<AgentAnswer> SessionProgram::answers(std::chrono::milliseconds wait) {
  constexpr std::chrono::milliseconds kSlice(2);
  const auto until = std::chrono::steady_clock::now() + wait;
  while (true) {
    auto answers = AgentProgram::answers(std::chrono::milliseconds(0));
    std::unique_lock lock(mutex_);
    for (auto& request : std::exchange(requests_, {}))
      if (close(request.id)) answers.push_back(std::move(request));
    if (!answers.empty() || !has_open() || std::chrono::steady_clock::now() >= until)
      return answers;
    arrived_.wait_for(lock, kSlice, [&] { return !requests_.empty(); });
  }
}

}  // namespace ferry::trainer
