#include "serve/bridge/ranked_engine.h"

#include <utility>

#include "distckpt/base/cbor.h"

namespace ferry::serve {
namespace {

using nlohmann::json;
using rollout::SamplingParams;

template <typename T>
json or_null(const std::optional<T>& value) {
  return value ? json(*value) : json();
}

template <typename T>
void read_optional(const json& value, std::optional<T>& into) {
  if (!value.is_null()) into = value.get<T>();
}

// Stop strings are the server's business: engines know tokens alone.
json params_json(const SamplingParams& params) {
  return {params.n,
          params.temperature,
          params.top_k,
          params.top_p,
          params.min_p,
          params.repetition_penalty,
          params.presence_penalty,
          params.frequency_penalty,
          or_null(params.seed),
          params.stop_token_ids,
          params.ignore_eos,
          params.max_tokens,
          params.min_tokens,
          or_null(params.logprobs)};
}

SamplingParams read_params(const json& list) {
  SamplingParams params;
  std::size_t i = 0;
  const auto read = [&](auto& into) { list.at(i++).get_to(into); };
  read(params.n);
  read(params.temperature);
  read(params.top_k);
  read(params.top_p);
  read(params.min_p);
  read(params.repetition_penalty);
  read(params.presence_penalty);
  read(params.frequency_penalty);
  read_optional(list.at(i++), params.seed);
  read(params.stop_token_ids);
  read(params.ignore_eos);
  read(params.max_tokens);
  read(params.min_tokens);
  read_optional(list.at(i++), params.logprobs);
  return params;
}

void call(EngineSteps& engine, const json& one, std::function<void()>& load) {
  const auto name = one.at(0).get<std::string>();
  if (name == "add_request") {
    engine.add_request(one.at(1).get<std::string>(), one.at(2).get<std::vector<std::int64_t>>(),
                       read_params(one.at(3)));
  } else if (name == "abort") {
    engine.abort(one.at(1).get<std::string>());
  } else if (name == "abort_sample") {
    engine.abort(one.at(1).get<std::string>(), one.at(2).get<std::int64_t>());
  } else if (name == "step") {
    engine.step();
  } else if (name == "reset_prefix_cache") {
    engine.reset_prefix_cache();
  } else if (name == "open_weights") {
    load = nullptr;
    load = engine.open_weights({one.at(1).get<std::string>(), one.at(2).get<std::string>()});
  } else if (name == "load_weights") {
    require(load != nullptr, ErrorKind::kIo, "the weights that rank 0 loads could not be opened");
    std::exchange(load, nullptr)();
  } else if (name == "sleep") {
    engine.sleep(one.at(1).get<int>());
  } else {
    engine.wake_up();
  }
}

}  // namespace

void RankedEngine::tell() {
  const auto bytes = to_cbor(std::exchange(calls_, json::array()));
  for (int rank = 1; rank < num_ranks_; ++rank) mail_.send(bytes, rank, "the engine's next calls");
}

void RankedEngine::end() {
  calls_.push_back({"end"});
  tell();
}

void RankedEngine::add_request(const std::string& request_id,
                               const std::vector<std::int64_t>& prompt_token_ids,
                               const SamplingParams& params) {
  calls_.push_back({"add_request", request_id, prompt_token_ids, params_json(params)});
  mine_.add_request(request_id, prompt_token_ids, params);
}

void RankedEngine::abort(const std::string& request_id) {
  calls_.push_back({"abort", request_id});
  mine_.abort(request_id);
}

void RankedEngine::abort(const std::string& request_id, std::int64_t index) {
  calls_.push_back({"abort_sample", request_id, index});
  mine_.abort(request_id, index);
}

std::vector<rollout::RequestOutput> RankedEngine::step() {
  calls_.push_back({"step"});
  tell();
  return mine_.step();
}

void RankedEngine::reset_prefix_cache() {
  calls_.push_back({"reset_prefix_cache"});
  mine_.reset_prefix_cache();
}

std::function<void()> RankedEngine::open_weights(const WeightSource& source) {
  calls_.push_back({"open_weights", source.checkpoint, source.iteration});
  tell();
  return [this, load = mine_.open_weights(source)] {
    calls_.push_back({"load_weights"});
    tell();
    load();
  };
}

void RankedEngine::sleep(int level) {
  calls_.push_back({"sleep", level});
  tell();
  mine_.sleep(level);
}

void RankedEngine::wake_up() {
  calls_.push_back({"wake_up"});
  tell();
  mine_.wake_up();
}

void follow(EngineSteps& mine, const models::Mailbox& mail) {
  std::function<void()> load;
  while (true) {
    for (const auto& one : from_cbor<json>(mail.receive(0, "the engine's next calls"))) {
      if (one.at(0) == "end") return;
      try {
        call(mine, one, load);
      } catch (const Error&) {  // NOLINT(bugprone-empty-catch): rank 0 has it, too
      }
    }
  }
}

}  // namespace ferry::serve
