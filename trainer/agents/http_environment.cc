#include "trainer/agents/http_environment.h"

#include <fmt/format.h>

#include <span>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/storage/network/http.h"

namespace ferry::trainer {

using nlohmann::json;

namespace {

constexpr std::size_t kMostRequests = 64;                    // under way
constexpr std::int64_t kMostBytes = std::int64_t{16} << 20;  // of an answer, as of a program's line
constexpr std::chrono::seconds kLastNotices{1};

}  // namespace

HttpEnvironment::HttpEnvironment(AgentProgramOptions options)
    : AgentProgram(options), options_(std::move(options)) {
  while (options_.command.ends_with('/')) options_.command.pop_back();
}

HttpEnvironment::~HttpEnvironment() {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  added_.notify_all();
  idle_.wait_for(lock, kLastNotices, [&] { return requests_.empty() && num_working_ == 0; });
  stop_.request_stop();
  added_.notify_all();
  lock.unlock();
  workers_.clear();
}

void HttpEnvironment::ask(std::int64_t id, json question) {
  add({.id = id, .body = std::move(question)});
}

void HttpEnvironment::tell(const json& notice) {
  add({.body = notice});
}

void HttpEnvironment::add(Request request) {
  const std::lock_guard lock(mutex_);
  if (request.id >= 0) ++num_open_;
  requests_.push_back(std::move(request));
  const bool all_work = requests_.size() + num_working_ > workers_.size();
  if (all_work && workers_.size() < kMostRequests) workers_.emplace_back([this] { work(); });
  added_.notify_one();
}

void HttpEnvironment::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    added_.wait(lock, [&] { return stopping_ || !requests_.empty(); });
    if (requests_.empty() || stop_.stop_requested()) return;
    auto [id, body] = std::move(requests_.front());
    requests_.pop_front();
    if (stopping_ && id >= 0) continue;
    ++num_working_;
    lock.unlock();
    auto answer = answer_to(std::move(body));
    lock.lock();
    if (--num_working_ == 0) idle_.notify_one();
    if (id < 0) continue;
    if (std::exchange(was_silent_, answer.contains("timed_out")) && was_silent_)
      answer.erase("timed_out");
    answers_.push_back({id, std::move(answer)});
    answered_.notify_one();
  }
}

json HttpEnvironment::answer_to(json question) const {
  const auto url = options_.command + "/" + question.at("method").get<std::string>();
  question.erase("method");
  const auto body = question.dump(-1, ' ', false, json::error_handler_t::replace);
  const auto begin = std::chrono::steady_clock::now();
  json refusal;
  try {
    const auto attempt = distckpt::http_try({.method = "POST",
                                             .url = url,
                                             .headers = {"Content-Type: application/json"},
                                             .body = std::as_bytes(std::span(body)),
                                             .max_body = kMostBytes,
                                             .timeout = options_.timeout,
                                             .once = true,
                                             .stop = stop_.get_token()});
    if (!attempt.failure.empty() && std::chrono::steady_clock::now() - begin >= options_.timeout)
      refusal["timed_out"] = true;
    require(attempt.failure.empty() && attempt.response.ok(), ErrorKind::kIo, "{}",
            attempt.describe());
    return parse_answer(attempt.response.body);
  } catch (const Error& error) {
    refusal["error"] = fmt::format("{}: {}", distckpt::shown_url(url), error.what());
    return refusal;
  }
}

std::vector<AgentAnswer> HttpEnvironment::answers(std::chrono::milliseconds wait) {
  std::unique_lock lock(mutex_);
  if (num_open_ > 0) answered_.wait_for(lock, wait, [&] { return !answers_.empty(); });
  num_open_ -= answers_.size();
  return std::exchange(answers_, {});
}

}  // namespace ferry::trainer
