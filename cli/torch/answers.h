// The answers of `ferry generate` as JSON, and on standard output: a line of JSON or a paragraph of
// text each, in the order of the prompts, as soon as all before it are there.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>

#include "cli/torch/prompts.h"
#include "models/spec/transformer_config.h"
#include "rollout/output_processor.h"

namespace ferry::cli {

// {"id", "prompt", "prompt_token_ids", "outputs": [{"index", "text", "token_ids", "finish_reason",
// "stop_reason", "model_logprobs", "processed_logprobs", "top_logprobs", "routed_experts"}]}, or
// "error" in place of outputs. `has_text`: there is a tokenizer. `config`: of the model.
nlohmann::ordered_json answer_json(const Prompt& prompt,
                                   const rollout::Answer& answer,
                                   const models::TransformerConfig& config,
                                   bool has_text);

class AnswerPrinter {
 public:
  explicit AnswerPrinter(bool json) : json_(json) {}

  void add(std::int64_t number, nlohmann::ordered_json answer);  // of the prompt with this number
  std::int64_t num_refused() const { return num_refused_; }

 private:
  void print(std::int64_t number, const nlohmann::ordered_json& answer);

  bool json_;
  std::int64_t next_ = 0;
  std::int64_t num_refused_ = 0;
  std::map<std::int64_t, nlohmann::ordered_json> waiting_;
};

}  // namespace ferry::cli
