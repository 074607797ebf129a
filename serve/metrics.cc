#include "serve/metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

namespace ferry::serve {
namespace {

// vLLM's buckets (vllm/v1/metrics/loggers.py).
const std::vector<double> kFirstToken{0.001, 0.005, 0.01, 0.02,  0.04,  0.06,  0.08, 0.1,
                                      0.25,  0.5,   0.75, 1.0,   2.5,   5.0,   7.5,  10.0,
                                      20.0,  40.0,  80.0, 160.0, 640.0, 2560.0};
const std::vector<double> kBetweenTokens{0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2,  0.3,  0.4, 0.5,
                                         0.75, 1.0,   2.5,  5.0,   7.5, 10.0, 20.0, 40.0, 80.0};
const std::vector<double> kWholeAnswer{0.3,  0.5,   0.8,   1.0,   1.5,   2.0,    2.5,
                                       5.0,  10.0,  15.0,  20.0,  30.0,  40.0,   50.0,
                                       60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0};
const std::vector<double> kTokens{1,    2,    5,    10,    20,    50,    100,    200,   500,
                                  1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000};

const std::vector<double> kSamples{1, 2, 5, 10, 20};

std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if (c == '\\' || c == '"') result += '\\';
    result += c == '\n' ? ' ' : c;
  }
  return result;
}

std::string head(std::string_view name, std::string_view help, std::string_view type) {
  return fmt::format("# HELP {0} {1}\n# TYPE {0} {2}\n", name, help, type);
}

}  // namespace

void Histogram::add(double value) {
  const auto bucket = std::ranges::lower_bound(bounds_, value) - bounds_.begin();
  ++counts_[static_cast<std::size_t>(bucket)];
  sum_ += value;
}

std::string Histogram::text(std::string_view name, std::string_view labels) const {
  std::string lines;
  std::int64_t count = 0;
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    count += counts_[i];
    lines += fmt::format("{}_bucket{{{},le=\"{}\"}} {}\n", name, labels,
                         i < bounds_.size() ? fmt::format("{}", bounds_[i]) : "+Inf", count);
  }
  return lines +
         fmt::format("{0}_count{{{1}}} {2}\n{0}_sum{{{1}}} {3}\n", name, labels, count, sum_);
}

EngineMetrics::EngineMetrics()
    : time_to_first_token(kFirstToken),
      inter_token_latency(kBetweenTokens),
      e2e_request_latency(kWholeAnswer),
      request_prompt_tokens(kTokens),
      request_generation_tokens(kTokens),
      request_queue_time(kWholeAnswer),
      request_prefill_time(kWholeAnswer),
      request_decode_time(kWholeAnswer),
      request_time_per_output_token(kBetweenTokens),
      request_params_n(kSamples),
      request_params_max_tokens(kTokens) {}

std::string Metrics::text(const std::vector<std::optional<EngineStatus>>& statuses) const {
  std::string text;
  const auto labels_of = [&](std::size_t engine) {
    return fmt::format("engine=\"{}\",model_name=\"{}\"", engine, escaped(model_name_));
  };
  // Values of the engines that live.
  const auto add_status = [&](const char* type, const char* name, const char* help, auto value_of) {
    text += head(name, help, type);
    for (std::size_t i = 0; i < statuses.size(); ++i)
      if (statuses[i])
        text += fmt::format("{}{{{}}} {}\n", name, labels_of(i), value_of(*statuses[i]));
  };
  const auto add_count = [&](const char* name, const char* help,
                             std::int64_t EngineMetrics::*count) {
    text += head(name, help, "counter");
    for (std::size_t i = 0; i < engines_.size(); ++i)
      text += fmt::format("{}{{{}}} {}\n", name, labels_of(i), engines_[i].*count);
  };
  const auto add_histogram = [&](Histogram EngineMetrics::*one, const char* name,
                                 const char* help) {
    text += head(name, help, "histogram");
    for (std::size_t i = 0; i < engines_.size(); ++i)
      text += (engines_[i].*one).text(name, labels_of(i));
  };
  using Status = EngineStatus;
  add_status("gauge", "vllm:num_requests_running", "Sequences that steps compute.",
             [](const Status& status) { return status.stats.num_running; });
  add_status("gauge", "vllm:num_requests_waiting", "Sequences that wait for a place.",
             [](const Status& status) { return status.stats.num_waiting + status.num_held; });
  add_status("gauge", "vllm:kv_cache_usage_perc", "Share of the KV cache in use, 1: all.",
             [](const Status& status) {
               const auto all = status.stats.num_blocks;
               const auto used = all - status.stats.num_free_blocks;
               return all == 0 ? 0.0 : static_cast<double>(used) / static_cast<double>(all);
             });
  add_status(
      "counter", "vllm:prefix_cache_queries_total", "Tokens looked up in the prefix cache.",
      [](const Status& status) { return status.stats.prompt_tokens + status.stats.cached_tokens; });
  add_status("counter", "vllm:prefix_cache_hits_total", "Tokens found there.",
             [](const Status& status) { return status.stats.cached_tokens; });
  add_status("counter", "vllm:num_preemptions_total", "Sequences that gave up their blocks.",
             [](const Status& status) { return status.stats.num_preemptions; });
  add_count("vllm:prompt_tokens_total", "Tokens of prompts.", &EngineMetrics::prompt_tokens);
  add_count("vllm:generation_tokens_total", "Tokens of answers.",
            &EngineMetrics::generation_tokens);
  text += head("vllm:request_success_total", "Answers, by their finish reason.", "counter");
  for (std::size_t i = 0; i < engines_.size(); ++i)
    for (const auto& [reason, count] : engines_[i].finished)
      text += fmt::format("vllm:request_success_total{{{},finished_reason=\"{}\"}} {}\n",
                          labels_of(i), reason, count);
  add_histogram(&EngineMetrics::time_to_first_token, "vllm:time_to_first_token_seconds",
                "From a request to its first token.");
  add_histogram(&EngineMetrics::inter_token_latency, "vllm:inter_token_latency_seconds",
                "From token to token.");
  add_histogram(&EngineMetrics::e2e_request_latency, "vllm:e2e_request_latency_seconds",
                "From a request to its answer's end.");
  add_histogram(&EngineMetrics::request_prompt_tokens, "vllm:request_prompt_tokens",
                "Tokens of a prompt.");
  add_histogram(&EngineMetrics::request_generation_tokens, "vllm:request_generation_tokens",
                "Tokens of an answer.");
  add_histogram(&EngineMetrics::request_queue_time, "vllm:request_queue_time_seconds",
                "From a request to the first step that computes its prompt.");
  add_histogram(&EngineMetrics::request_prefill_time, "vllm:request_prefill_time_seconds",
                "From that step to the first token.");
  add_histogram(&EngineMetrics::request_decode_time, "vllm:request_decode_time_seconds",
                "From the first token to the last one.");
  add_histogram(&EngineMetrics::request_time_per_output_token,
                "vllm:request_time_per_output_token_seconds",
                "Decode time by the tokens behind the first one.");
  add_histogram(&EngineMetrics::request_params_n, "vllm:request_params_n", "n of a request.");
  add_histogram(&EngineMetrics::request_params_max_tokens, "vllm:request_params_max_tokens",
                "max_tokens of a request.");
  return text;
}

}  // namespace ferry::serve
