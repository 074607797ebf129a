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

std::string Histogram::text(std::string_view name,
                            std::string_view help,
                            std::string_view labels) const {
  auto lines = head(name, help, "histogram");
  std::int64_t count = 0;
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    count += counts_[i];
    lines += fmt::format("{}_bucket{{{},le=\"{}\"}} {}\n", name, labels,
                         i < bounds_.size() ? fmt::format("{}", bounds_[i]) : "+Inf", count);
  }
  return lines +
         fmt::format("{0}_count{{{1}}} {2}\n{0}_sum{{{1}}} {3}\n", name, labels, count, sum_);
}

Metrics::Metrics(const std::string& model_name)
    : time_to_first_token(kFirstToken),
      inter_token_latency(kBetweenTokens),
      e2e_request_latency(kWholeAnswer),
      request_prompt_tokens(kTokens),
      request_generation_tokens(kTokens),
      labels_(fmt::format("engine=\"0\",model_name=\"{}\"", escaped(model_name))) {}

std::string Metrics::text(const EngineStatus& status) const {
  const auto& stats = status.stats;
  std::string text;
  const auto add = [&](const char* type, const char* name, const char* help, auto value) {
    text += head(name, help, type) + fmt::format("{}{{{}}} {}\n", name, labels_, value);
  };
  const auto used = stats.num_blocks - stats.num_free_blocks;
  add("gauge", "vllm:num_requests_running", "Sequences that steps compute.", stats.num_running);
  add("gauge", "vllm:num_requests_waiting", "Sequences that wait for a place.",
      stats.num_waiting + status.num_held);
  add("gauge", "vllm:kv_cache_usage_perc", "Share of the KV cache in use, 1: all.",
      stats.num_blocks == 0 ? 0.0
                            : static_cast<double>(used) / static_cast<double>(stats.num_blocks));
  add("counter", "vllm:prefix_cache_queries_total", "Tokens looked up in the prefix cache.",
      stats.prompt_tokens + stats.cached_tokens);
  add("counter", "vllm:prefix_cache_hits_total", "Tokens found there.", stats.cached_tokens);
  add("counter", "vllm:num_preemptions_total", "Sequences that gave up their blocks.",
      stats.num_preemptions);
  add("counter", "vllm:prompt_tokens_total", "Tokens of prompts.", prompt_tokens);
  add("counter", "vllm:generation_tokens_total", "Tokens of answers.", generation_tokens);
  text += head("vllm:request_success_total", "Answers, by their finish reason.", "counter");
  for (const auto& [reason, count] : finished)
    text += fmt::format("vllm:request_success_total{{{},finished_reason=\"{}\"}} {}\n", labels_,
                        reason, count);
  const auto add_histogram = [&](const Histogram& one, const char* name, const char* help) {
    text += one.text(name, help, labels_);
  };
  add_histogram(time_to_first_token, "vllm:time_to_first_token_seconds",
                "From a request to its first token.");
  add_histogram(inter_token_latency, "vllm:inter_token_latency_seconds", "From token to token.");
  add_histogram(e2e_request_latency, "vllm:e2e_request_latency_seconds",
                "From a request to its answer's end.");
  add_histogram(request_prompt_tokens, "vllm:request_prompt_tokens", "Tokens of a prompt.");
  add_histogram(request_generation_tokens, "vllm:request_generation_tokens",
                "Tokens of an answer.");
  return text;
}

}  // namespace ferry::serve
