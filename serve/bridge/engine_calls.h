// Calls of an engine as values that one rank tells another.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "serve/engine_loop.h"

namespace ferry::serve {

nlohmann::json add_request_call(const std::string& request_id,
                                const std::vector<std::int64_t>& prompt_token_ids,
                                const rollout::SamplingParams& params,
                                const ImageFiles& images);
nlohmann::json abort_call(const std::string& request_id);
nlohmann::json abort_call(const std::string& request_id, std::int64_t index);
nlohmann::json begin_open_weights_call(const WeightSource& source);
nlohmann::json open_weights_call(const WeightSource& source);

nlohmann::json error_json(const Error& error);
Error read_error(const nlohmann::json& value);

// The engine that calls are made on, and the weights that the last open_weights has opened.
struct CalledEngine {
  EngineSteps& engine;
  std::function<void()> load{};
};

// Makes a call: one of the above, or {"step"}, {"reset_prefix_cache"}, {"load_weights"}, {"sleep",
// level}, {"wake_up"}. Returns the outputs of a step.
std::vector<rollout::RequestOutput> make_call(CalledEngine& called, const nlohmann::json& call);

}  // namespace ferry::serve
