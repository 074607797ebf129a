// The server's counters, in Prometheus' text format under vLLM's names.
#pragma once

#include <cstdint>
#include <map>
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
  // The lines of the metric. `labels`: `model_name="x"`.
  std::string text(std::string_view name, std::string_view help, std::string_view labels) const;

 private:
  std::vector<double> bounds_;
  std::vector<std::int64_t> counts_;
  double sum_ = 0;
};

class Metrics {
 public:
  explicit Metrics(const std::string& model_name);

  std::string text(const EngineStatus& status) const;

  std::int64_t prompt_tokens = 0;
  std::int64_t generation_tokens = 0;
  std::map<std::string_view, std::int64_t> finished{};  // samples, by finish reason
  Histogram time_to_first_token;
  Histogram inter_token_latency;
  Histogram e2e_request_latency;
  Histogram request_prompt_tokens;
  Histogram request_generation_tokens;

 private:
  std::string labels_;
};

}  // namespace ferry::serve
