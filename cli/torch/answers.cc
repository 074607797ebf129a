#include "cli/torch/answers.h"

#include <ATen/core/Tensor.h>
#include <fmt/format.h>

#include <cstdio>
#include <utility>

#include "cli/report/json.h"
#include "rollout/routed_experts.h"

namespace ferry::cli {
namespace {

using nlohmann::ordered_json;

// A tensor's numbers, in nested lists.
ordered_json nested(const at::Tensor& tensor) {
  if (tensor.dim() == 0) return tensor.item<std::int64_t>();
  auto list = ordered_json::array();
  for (std::int64_t i = 0; i < tensor.size(0); ++i) list.push_back(nested(tensor[i]));
  return list;
}

ordered_json completion_json(std::size_t index,
                             const rollout::Completion& completion,
                             const models::TransformerConfig& config,
                             bool has_text,
                             bool with_top) {
  auto ids = ordered_json::array(), model = ids, processed = ids, top = ids;
  for (const auto& token : completion.tokens) {
    ids.push_back(token.token_id);
    model.push_back(token.logprob);
    processed.push_back(token.processed_logprob);
    auto& likeliest = top.emplace_back(ordered_json::array());
    for (const auto& one : token.top)
      likeliest.push_back({{"token_id", one.token_id}, {"model_logprob", one.logprob}});
  }
  ordered_json json{{"index", index}};
  if (has_text) json["text"] = completion.text;
  json["token_ids"] = std::move(ids);
  json["finish_reason"] = rollout::to_string(completion.finish_reason);
  if (completion.stop_string) {
    json["stop_reason"] = *completion.stop_string;
  } else {
    json["stop_reason"] =
        completion.stop_token ? ordered_json(*completion.stop_token) : ordered_json();
  }
  json["model_logprobs"] = std::move(model);
  json["processed_logprobs"] = std::move(processed);
  if (with_top) json["top_logprobs"] = std::move(top);
  if (!completion.routed_experts.empty())
    json["routed_experts"] =
        nested(rollout::routed_experts_tensor(completion.routed_experts, config));
  return json;
}

// Text where there is some, else the ids.
std::string readable(const ordered_json& output) {
  return output.contains("text") ? output["text"].get<std::string>() : output["token_ids"].dump();
}

}  // namespace

ordered_json answer_json(const Prompt& prompt,
                         const rollout::Answer& answer,
                         const models::TransformerConfig& config,
                         bool has_text) {
  ordered_json json{{"id", prompt.id}};
  if (prompt.text) json["prompt"] = *prompt.text;
  if (answer.error) {
    json["error"] = error_json(*answer.error)["error"];
    return json;
  }
  json["prompt_token_ids"] = prompt.token_ids;
  auto& outputs = json["outputs"] = ordered_json::array();
  for (std::size_t i = 0; i < answer.completions.size(); ++i)
    outputs.push_back(completion_json(i, answer.completions[i], config, has_text,
                                      prompt.params.logprobs.value_or(0) > 0));
  return json;
}

void AnswerPrinter::add(std::int64_t number, ordered_json answer) {
  waiting_.emplace(number, std::move(answer));
  for (auto first = waiting_.begin(); first != waiting_.end() && first->first == next_;
       first = waiting_.begin(), ++next_) {
    print(first->first, first->second);
    waiting_.erase(first);
  }
  std::fflush(stdout);
}

void AnswerPrinter::print(std::int64_t number, const ordered_json& answer) {
  const bool refused = answer.contains("error");
  num_refused_ += refused;
  if (json_) {  // a prompt that is not UTF-8 is shown as such
    fmt::print("{}\n", answer.dump(-1, ' ', false, ordered_json::error_handler_t::replace));
  } else if (refused) {
    const auto& error = answer["error"];
    fmt::print(stderr, "error: prompt {}: {}\n", answer["id"].get<std::string>(),
               error["message"].get<std::string>());
  } else {
    for (const auto& output : answer["outputs"])
      fmt::print(
          "{}--- {}{} ({})\n{}\n", number == 0 && output["index"] == 0 ? "" : "\n",
          answer["id"].get<std::string>(),
          answer["outputs"].size() == 1 ? "" : fmt::format(".{}", output["index"].get<int>()),
          output["finish_reason"].get<std::string>(), readable(output));
  }
}

}  // namespace ferry::cli
