// The server's counters, in Prometheus' text format under vLLM's names.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "serve/engine_loop.h"

namespace ferry::serve {

class Histogram {
 public:
  // Upper bounds of its buckets, ascending; one without a bound follows.
  explicit Histogram(std::vector<double> bounds)
      : bounds_(std::move(bounds)), counts_(bounds_.size() + 1, 0) {}

  void add(double value);
  // The samples of the metric. `labels`: `model_name="x"`.
  std::string text(std::string_view name, std::string_view labels) const;

 private:
  std::vector<double> bounds_;
  std::vector<std::int64_t> counts_;
  double sum_ = 0;
};

// Counters of the answers that an engine has drawn: a sample is what vLLM's engine calls a request.
struct EngineMetrics {
  EngineMetrics();

  std::int64_t prompt_tokens = 0;
  std::int64_t generation_tokens = 0;
  std::map<std::string_view, std::int64_t> finished{};  // samples, by finish reason
  Histogram time_to_first_token;
  Histogram inter_token_latency;
  Histogram e2e_request_latency;
  Histogram request_prompt_tokens;
  Histogram request_generation_tokens;
  Histogram request_queue_time;
  Histogram request_prefill_time;
  Histogram request_decode_time;
  Histogram request_time_per_output_token;
  Histogram request_params_n;
  Histogram request_params_max_tokens;
};

class Metrics {
 public:
  Metrics(const std::string& model_name, std::size_t num_engines)
      : model_name_(model_name), engines_(num_engines) {}

  EngineMetrics& of(std::size_t engine) { return engines_[engine]; }
  // `statuses`: of each engine; one that has failed has none, and keeps its counters.
  std::string text(const std::vector<std::optional<EngineStatus>>& statuses) const;

 private:
  std::string model_name_;
  std::vector<EngineMetrics> engines_;
};

}  // namespace ferry::serve
