#include "serve/bridge/engine_calls.h"

#include <utility>

#include "distckpt/base/error.h"
#include "rollout/schedule/sampling_params_json.h"

namespace ferry::serve {
namespace {

using nlohmann::json;
using rollout::SamplingParams;

json images_json(const ImageFiles& images) {
  auto files = json::array();
  if (images) {
    for (const auto& file : *images) files.push_back(json::binary({file.begin(), file.end()}));
  }
  return files;
}

ImageFiles read_images(const json& list) {
  if (list.empty()) return nullptr;
  std::vector<std::string> files;
  for (const auto& one : list) {
    const auto& bytes = one.get_binary();
    files.emplace_back(bytes.begin(), bytes.end());
  }
  return std::make_shared<const std::vector<std::string>>(std::move(files));
}

json source_call(const char* name, const WeightSource& source) {
  return {name, source.checkpoint, source.iteration, source.delta, source.are_previous};
}

WeightSource read_source(const json& call) {
  return {.checkpoint = call.at(1).get<std::string>(),
          .iteration = call.at(2).get<std::string>(),
          .delta = call.at(3).get<std::string>(),
          .are_previous = call.at(4).get<bool>()};
}

}  // namespace

json add_request_call(const std::string& request_id,
                      const std::vector<std::int64_t>& prompt_token_ids,
                      const SamplingParams& params,
                      const ImageFiles& images) {
  return {"add_request", request_id, prompt_token_ids, params, images_json(images)};
}

json abort_call(const std::string& request_id) {
  return {"abort", request_id};
}

json abort_call(const std::string& request_id, std::int64_t index) {
  return {"abort_sample", request_id, index};
}

json begin_open_weights_call(const WeightSource& source) {
  return source_call("begin_open_weights", source);
}

json open_weights_call(const WeightSource& source) {
  return source_call("open_weights", source);
}

json error_json(const Error& error) {
  return {static_cast<int>(error.kind()), error.what()};
}

Error read_error(const json& value) {
  return {static_cast<ErrorKind>(value.at(0).get<int>()), value.at(1).get<std::string>()};
}

std::vector<rollout::RequestOutput> make_call(CalledEngine& called, const json& call) {
  auto& [engine, load] = called;
  const auto name = call.at(0).get<std::string>();
  if (name == "step") return engine.step();
  if (name == "add_request") {
    engine.add_request(call.at(1).get<std::string>(), call.at(2).get<std::vector<std::int64_t>>(),
                       call.at(3).get<SamplingParams>(), read_images(call.at(4)));
  } else if (name == "abort") {
    engine.abort(call.at(1).get<std::string>());
  } else if (name == "abort_sample") {
    engine.abort(call.at(1).get<std::string>(), call.at(2).get<std::int64_t>());
  } else if (name == "reset_prefix_cache") {
    engine.reset_prefix_cache();
  } else if (name == "open_weights") {
    load = nullptr;
    load = engine.open_weights(read_source(call));
  } else if (name == "begin_open_weights") {
    engine.begin_open_weights(read_source(call));
  } else if (name == "load_weights") {
    require(load != nullptr, ErrorKind::kIo, "the weights that rank 0 loads could not be opened");
    std::exchange(load, nullptr)();
  } else if (name == "sleep") {
    engine.sleep(call.at(1).get<int>());
  } else {
    engine.wake_up();
  }
  return {};
}

}  // namespace ferry::serve
