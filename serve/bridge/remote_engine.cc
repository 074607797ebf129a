#include "serve/bridge/remote_engine.h"

#include <concepts>
#include <optional>
#include <ranges>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "distckpt/base/foreign_error.h"
#include "models/distributed/messages.h"
#include "serve/bridge/engine_calls.h"

namespace ferry::serve {

using nlohmann::json;
using rollout::EngineStats;
using rollout::RequestOutput;

namespace {

template <typename T, typename U>
concept Is = std::same_as<std::remove_const_t<T>, U>;

// The members of a struct in the order in which a packet has them.
template <Is<rollout::TokenOutput::Top> T>
auto members(T& of) {
  return std::tie(of.token_id, of.logprob);
}
template <Is<rollout::TokenOutput> T>
auto members(T& of) {
  return std::tie(of.token_id, of.logprob, of.processed_logprob, of.top);
}
template <Is<rollout::PromptTokenOutput> T>
auto members(T& of) {
  return std::tie(of.token_id, of.logprob, of.rank, of.top);
}
template <Is<rollout::CompletionOutput> T>
auto members(T& of) {
  return std::tie(of.index, of.tokens, of.finish_reason, of.stop_reason, of.prefill_seconds);
}
template <Is<RequestOutput> T>
auto members(T& of) {
  return std::tie(of.request_id, of.outputs, of.finished, of.error, of.prompt_logprobs,
                  of.num_cached_tokens);
}
template <Is<EngineStats> T>
auto members(T& of) {
  return std::tie(of.num_blocks, of.num_free_blocks, of.num_waiting, of.num_running,
                  of.num_preemptions, of.prompt_tokens, of.cached_tokens, of.output_tokens,
                  of.steps);
}

template <typename T>
json packet_of(const T& value) {
  if constexpr (requires { members(value); }) {
    return std::apply([](const auto&... each) { return json::array({packet_of(each)...}); },
                      members(value));
  } else if constexpr (requires { value.has_value(); }) {
    return value ? packet_of(*value) : json();
  } else if constexpr (std::same_as<T, Error>) {
    return error_json(value);
  } else if constexpr (std::same_as<T, std::string> || !std::ranges::range<T>) {
    return value;
  } else {
    auto list = json::array();
    for (const auto& one : value) list.push_back(packet_of(one));
    return list;
  }
}

template <typename T>
void read_packet(const json& packet, T& value) {
  if constexpr (requires { members(value); }) {
    std::size_t i = 0;
    std::apply([&](auto&... each) { (read_packet(packet.at(i++), each), ...); }, members(value));
  } else if constexpr (std::same_as<T, std::optional<Error>>) {
    if (!packet.is_null()) value = read_error(packet);
  } else if constexpr (requires { value.has_value(); }) {
    if (!packet.is_null()) read_packet(packet, value.emplace());
  } else if constexpr (std::same_as<T, std::string> || !std::ranges::range<T>) {
    packet.get_to(value);
  } else {
    for (const auto& one : packet) read_packet(one, value.emplace_back());
  }
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
  read_packet(answer.at("stats"), stats_);
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
  read_packet(ask({"step"}), outputs);
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
          for (const auto& output : make_call(called, one)) outputs.push_back(packet_of(output));
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
                      {"stats", packet_of(mine.stats())}},
                 0, "the engine's answer");
    if (lost) throw Error(*lost);
  }
}

}  // namespace ferry::serve
