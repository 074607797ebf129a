// The program of tests/interop/rollout/test_sampling.py: a row of logits and its parameters in JSON
// on each line of standard input, the processed distribution in JSON on each line of standard
// output.
//
//   {"logits": [...], "prompt": [ids], "output": [ids], "temperature": t, "top_k": k, "top_p": p,
//   "min_p": m, "repetition_penalty": r, "presence_penalty": a, "frequency_penalty": f}
//     {"kept": [ids], "logprobs": [of each kept id]}
#include <fmt/format.h>

#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "rollout/kernels/host_row.h"

namespace ferry::rollout {
namespace {

nlohmann::json answer(const nlohmann::json& request) {
  const auto logits = request.at("logits").get<std::vector<float>>();
  const DrawRow draw{.top_p = request.at("top_p"),
                     .min_p = request.at("min_p"),
                     .top_k = request.at("top_k"),
                     .inverse_temperature = 1 / request.at("temperature").get<float>(),
                     .penalties = {.repetition = request.at("repetition_penalty"),
                                   .presence = request.at("presence_penalty"),
                                   .frequency = request.at("frequency_penalty")}};
  std::map<std::int32_t, std::int32_t> counts;
  for (const std::int32_t token : request.at("prompt")) counts.try_emplace(token, 0);
  for (const std::int32_t token : request.at("output")) ++counts[token];
  std::vector<LogitChange> changes;
  for (const auto& [token, count] : counts) changes.push_back({.token = token, .count = count});
  std::vector<float> z(logits.size());
  HostRow row(draw, z);
  row.read(logits.data(), changes);
  row.truncate();
  auto kept = nlohmann::json::array(), logprobs = kept;
  for (std::size_t i = 0; i < z.size(); ++i) {
    if (z[i] == kMinusInfinity) continue;
    kept.push_back(i);
    logprobs.push_back(row.log_prob(static_cast<std::int64_t>(i)));
  }
  return {{"kept", kept}, {"logprobs", logprobs}};
}

}  // namespace
}  // namespace ferry::rollout

int main() {
  for (std::string line; std::getline(std::cin, line);)
    fmt::print("{}\n", ferry::rollout::answer(nlohmann::json::parse(line)).dump());
}
