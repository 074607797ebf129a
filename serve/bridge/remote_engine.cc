#include "serve/bridge/remote_engine.h"

#include <utility>

#include "distckpt/base/foreign_error.h"
#include "models/distributed/messages.h"
#include "serve/bridge/engine_calls.h"

namespace ferry::serve {

using nlohmann::json;
using rollout::EngineStats;
using rollout::RequestOutput;

namespace {

using LikelyTokens = std::vector<rollout::TokenOutput::Top>;

json top_json(const LikelyTokens& tokens) {
  auto top = json::array();
  for (const auto& one : tokens) top.push_back({one.token_id, one.logprob});
  return top;
}

LikelyTokens read_top(const json& value) {
  LikelyTokens top;
  for (const auto& one : value)
    top.push_back({.token_id = one.at(0).get<std::int64_t>(), .logprob = one.at(1).get<float>()});
  return top;
}

json token_json(const rollout::TokenOutput& token) {
  return {token.token_id, token.logprob, token.processed_logprob, top_json(token.top)};
}

json prompt_token_json(const rollout::PromptTokenOutput& token) {
  return {token.token_id, token.logprob, token.rank, top_json(token.top)};
}

rollout::PromptTokenOutput read_prompt_token(const json& value) {
  return {.token_id = value.at(0).get<std::int64_t>(),
          .logprob = value.at(1).get<float>(),
          .rank = value.at(2).get<std::int64_t>(),
          .top = read_top(value.at(3))};
}

rollout::TokenOutput read_token(const json& value) {
  return {.token_id = value.at(0).get<std::int64_t>(),
          .logprob = value.at(1).get<float>(),
          .processed_logprob = value.at(2).get<float>(),
          .top = read_top(value.at(3))};
}

template <typename T>
json optional_json(const std::optional<T>& value) {
  return value ? json(*value) : json();
}

template <typename T>
void read_optional(const json& value, std::optional<T>& into) {
  if (!value.is_null()) into = value.get<T>();
}

json output_json(const RequestOutput& output) {
  auto samples = json::array();
  for (const auto& sample : output.outputs) {
    auto tokens = json::array();
    for (const auto& token : sample.tokens) tokens.push_back(token_json(token));
    samples.push_back({sample.index, std::move(tokens), static_cast<int>(sample.finish_reason),
                       optional_json(sample.stop_reason), optional_json(sample.prefill_seconds)});
  }
  auto prompt = json::array();
  for (const auto& token : output.prompt_logprobs) prompt.push_back(prompt_token_json(token));
  return {output.request_id, std::move(samples),
          output.finished,   output.error ? error_json(*output.error) : json(),
          std::move(prompt), optional_json(output.num_cached_tokens)};
}

RequestOutput read_output(const json& value) {
  RequestOutput output{.request_id = value.at(0).get<std::string>(),
                       .finished = value.at(2).get<bool>()};
  for (const auto& one : value.at(1)) {
    auto& sample = output.outputs.emplace_back();
    sample.index = one.at(0).get<std::int64_t>();
    for (const auto& token : one.at(1)) sample.tokens.push_back(read_token(token));
    sample.finish_reason = static_cast<rollout::FinishReason>(one.at(2).get<int>());
    read_optional(one.at(3), sample.stop_reason);
    read_optional(one.at(4), sample.prefill_seconds);
  }
  if (!value.at(3).is_null()) output.error = read_error(value.at(3));
  for (const auto& token : value.at(4)) output.prompt_logprobs.push_back(read_prompt_token(token));
  read_optional(value.at(5), output.num_cached_tokens);
  return output;
}

json stats_json(const EngineStats& stats) {
  return {stats.num_blocks,    stats.num_free_blocks, stats.num_waiting,
          stats.num_running,   stats.num_preemptions, stats.prompt_tokens,
          stats.cached_tokens, stats.output_tokens,   stats.steps};
}

EngineStats read_stats(const json& list) {
  EngineStats stats;
  std::size_t i = 0;
  for (auto* const into : {&stats.num_blocks, &stats.num_free_blocks, &stats.num_waiting,
                           &stats.num_running, &stats.num_preemptions, &stats.prompt_tokens,
                           &stats.cached_tokens, &stats.output_tokens, &stats.steps})
    list.at(i++).get_to(*into);
  return stats;
}

}  // namespace

// Sends a call and those before it, and takes the answer. Returns a step's outputs.
json RemoteEngine::ask(const json& call) {
  if (lost_) throw Error(*lost_);
  calls_.push_back(call);
  json answer;
  try {
    models::send(mail_, std::exchange(calls_, json::array()), rank_, "the engine's next calls");
    answer = models::receive<json>(mail_, rank_, "the engine's answer");
  } catch (const std::exception& error) {
    lost_ = as_error(error);
    throw Error(*lost_);
  }
  has_unfinished_ = answer.at("has_unfinished").get<bool>();
  is_opening_ = answer.at("is_opening").get<bool>();
  stats_ = read_stats(answer.at("stats"));
  if (answer.at("error").is_null()) return std::move(answer.at("outputs"));
  auto error = read_error(answer.at("error"));
  if (answer.at("is_lost").get<bool>()) lost_ = error;
  throw Error(std::move(error));
}

void RemoteEngine::add_request(const std::string& request_id,
                               const std::vector<std::int64_t>& prompt_token_ids,
                               const rollout::SamplingParams& params,
                               const ImageFiles& images) {
  calls_.push_back(add_request_call(request_id, prompt_token_ids, params, images));
  has_unfinished_ = true;
}

void RemoteEngine::abort(const std::string& request_id) {
  calls_.push_back(abort_call(request_id));
}

void RemoteEngine::abort(const std::string& request_id, std::int64_t index) {
  calls_.push_back(abort_call(request_id, index));
}

std::vector<RequestOutput> RemoteEngine::step() {
  std::vector<RequestOutput> outputs;
  for (const auto& one : ask({"step"})) outputs.push_back(read_output(one));
  return outputs;
}

void RemoteEngine::reset_prefix_cache() {
  ask({"reset_prefix_cache"});
}

void RemoteEngine::begin_open_weights(const WeightSource& source) {
  ask(begin_open_weights_call(source));
}

std::function<void()> RemoteEngine::open_weights(const WeightSource& source) {
  ask(open_weights_call(source));
  return [this] { ask({"load_weights"}); };
}

void RemoteEngine::sleep(int level) {
  ask({"sleep", level});
}

void RemoteEngine::wake_up() {
  ask({"wake_up"});
}

// Tells the other rank that this one lives.
void RemoteEngine::idle() {
  ask({"idle"});
}

void RemoteEngine::end() {
  if (lost_) return;
  calls_.push_back({"end"});
  try {
    models::send(mail_, calls_, rank_, "the engine's next calls");
  } catch (const Error& error) {
    lost_ = error;
  }
}

void answer_calls(EngineSteps& mine, const models::Mailbox& mail) {
  CalledEngine called{.engine = mine};
  while (true) {
    json outputs = json::array(), error;
    std::optional<Error> lost;
    for (const auto& one : models::receive<json>(mail, 0, "the engine's next calls")) {
      if (one.at(0) == "end") return;
      try {
        if (one.at(0) == "idle") {
          mine.idle();
        } else {
          for (const auto& output : make_call(called, one)) outputs.push_back(output_json(output));
        }
      } catch (const std::exception& caught) {
        error = error_json(as_error(caught));
        if (mine.is_lost()) lost = as_error(caught);
      }
    }
    // A step without requests answers nothing, and would keep a request that is gone under way.
    models::send(mail,
                 json{{"outputs", std::move(outputs)},
                      {"error", std::move(error)},
                      {"is_lost", lost.has_value()},
                      {"has_unfinished", mine.has_unfinished()},
                      {"is_opening", mine.is_opening()},
                      {"stats", stats_json(mine.stats())}},
                 0, "the engine's answer");
    if (lost) throw Error(*lost);
  }
}

}  // namespace ferry::serve
