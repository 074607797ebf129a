#include "trainer/metrics/val_metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

namespace ferry::trainer {
namespace {

constexpr std::size_t kNumDraws = 1000;
constexpr std::uint32_t kSeed = 42;

using Samples = std::vector<const ValidationSample*>;

struct MeanAndStd {
  double mean = 0;
  double std = 0;  // of the population
};

MeanAndStd mean_and_std(const std::vector<double>& values) {
  const auto count = static_cast<double>(values.size());
  const auto mean = std::accumulate(values.begin(), values.end(), 0.0) / count;
  double squares = 0;
  for (const auto value : values) squares += (value - mean) * (value - mean);
  return {.mean = mean, .std = std::sqrt(squares / count)};
}

// numpy: np.random.seed(42); np.random.choice(n, size=(1000, k)). Its generator is the Mersenne
// twister; a number is the low bits of the next 32, until they are below n.
std::vector<std::uint32_t> draw_indices(std::size_t n, std::size_t k) {
  std::mt19937 generator(kSeed);
  const auto last = static_cast<std::uint32_t>(n - 1);
  std::uint32_t mask = last;
  for (const int shift : {1, 2, 4, 8, 16}) mask |= mask >> shift;
  std::vector<std::uint32_t> indices(kNumDraws * k);
  for (auto& index : indices) {
    do {
      index = static_cast<std::uint32_t>(generator()) & mask;
    } while (index > last);
  }
  return indices;
}

// The draws of each n and k, made once.
class Bootstrap {
 public:
  // The mean of what `reduce` makes of each draw: of the indices of k out of n.
  template <typename Reduce>
  MeanAndStd operator()(std::size_t n, std::size_t k, Reduce&& reduce) {
    auto& indices = indices_[{n, k}];
    if (indices.empty()) indices = draw_indices(n, k);
    std::vector<double> reduced;
    reduced.reserve(kNumDraws);
    for (std::size_t i = 0; i < kNumDraws; ++i)
      reduced.push_back(reduce(std::span(indices).subspan(i * k, k)));
    return mean_and_std(reduced);
  }

 private:
  std::map<std::pair<std::size_t, std::size_t>, std::vector<std::uint32_t>> indices_;
};

// For whichever prediction most of the draw have, the earliest of those that as many have: the
// value of the first that has it.
double majority_value(std::span<const std::uint32_t> draw,
                      const std::vector<std::size_t>& votes,
                      const std::vector<double>& values) {
  std::vector<std::size_t> counts(votes.size());
  for (const auto i : draw) ++counts[votes[i]];
  std::size_t most = 0;
  for (const auto count : counts) most = std::max(most, count);
  const auto first =
      std::ranges::find_if(draw, [&](std::uint32_t i) { return counts[votes[i]] == most; });
  return values[*first];
}

// The number of each answer's prediction; nothing unless all have one.
std::vector<std::size_t> votes_of(const Samples& samples) {
  std::map<ValidationValue, std::size_t> numbers;
  std::vector<std::size_t> votes;
  for (const auto* sample : samples) {
    const auto found = sample->values.find("pred");
    if (found == sample->values.end()) return {};
    votes.push_back(numbers.emplace(found->second, numbers.size()).first->second);
  }
  return votes;
}

// The numbers of the answers that have the variable; nothing where it is a text.
std::vector<double> numbers_of(const Samples& samples, const std::string& variable) {
  std::vector<double> numbers;
  for (const auto* sample : samples) {
    const auto found = sample->values.find(variable);
    if (found == sample->values.end()) continue;
    const auto* number = std::get_if<double>(&found->second);
    if (number == nullptr) return {};
    numbers.push_back(*number);
  }
  return numbers;
}

// The numbers of one prompt and variable, and the N of each.
struct PromptMetric {
  double value = 0;
  std::size_t n = 0;
};

std::map<std::string, PromptMetric> prompt_metrics(const std::vector<double>& values,
                                                   const std::vector<std::size_t>& votes,
                                                   Bootstrap& bootstrap) {
  std::map<std::string, PromptMetric> metrics;
  const auto n = values.size();
  const auto of_all = mean_and_std(values);
  metrics[fmt::format("mean@{}", n)] = {of_all.mean, n};
  if (n == 1) return metrics;
  metrics[fmt::format("std@{}", n)] = {of_all.std, n};
  const auto value_at = [&](std::uint32_t i) { return values[i]; };
  const auto add = [&](std::string_view name, std::size_t k, auto&& reduce) {
    const auto found = bootstrap(n, k, reduce);
    metrics[fmt::format("{}@{}/mean", name, k)] = {found.mean, k};
    metrics[fmt::format("{}@{}/std", name, k)] = {found.std, k};
  };
  for (std::size_t k = 2, next = 0; next != n; k *= 2) {
    next = std::min(k, n);
    add("best", next, [&](auto draw) { return value_at(std::ranges::max(draw, {}, value_at)); });
    add("worst", next, [&](auto draw) { return value_at(std::ranges::min(draw, {}, value_at)); });
    if (votes.size() == n)
      add("maj", next, [&](auto draw) { return majority_value(draw, votes, values); });
  }
  return metrics;
}

// Over the prompts of a source.
struct SourceMetric {
  double sum = 0;
  std::size_t num_prompts = 0;
  std::size_t n = 0;

  double mean() const { return sum / static_cast<double>(num_prompts); }
};
using Variables = std::map<std::string, std::map<std::string, SourceMetric>>;  // by metric

void add_prompt(Variables& variables, const Samples& samples, Bootstrap& bootstrap) {
  const auto votes = votes_of(samples);
  std::set<std::string> names;
  for (const auto* sample : samples)
    for (const auto& [name, value] : sample->values) names.insert(name);
  for (const auto& name : names) {
    const auto values = numbers_of(samples, name);
    if (values.empty()) continue;
    for (const auto& [metric, of_prompt] : prompt_metrics(values, votes, bootstrap)) {
      auto& of_source = variables[name][metric];
      of_source.sum += of_prompt.value;
      of_source.n = of_prompt.n;
      ++of_source.num_prompts;
    }
  }
}

bool is_core(std::string_view metric) {
  return metric.starts_with("mean") || metric.starts_with("maj") || metric.starts_with("best");
}

}  // namespace

Metrics validation_metrics(std::span<const ValidationSample> samples) {
  std::map<std::string, std::map<std::string, Samples>> prompts_of_sources;
  for (const auto& sample : samples)
    prompts_of_sources[sample.data_source][sample.uid].push_back(&sample);

  Metrics result;
  Bootstrap bootstrap;
  for (const auto& [source, prompts] : prompts_of_sources) {
    Variables variables;
    for (const auto& [uid, of_prompt] : prompts) add_prompt(variables, of_prompt, bootstrap);
    const std::string core = variables.contains("acc") ? "acc" : "reward";
    for (const auto& [name, metrics] : variables) {
      std::size_t largest = 0;
      for (const auto& [metric, value] : metrics) largest = std::max(largest, value.n);
      for (const auto& [metric, value] : metrics) {
        const bool in_core = name == core && is_core(metric) && value.n == largest;
        result[fmt::format("{}/{}/{}/{}", in_core ? "val-core" : "val-aux", source, name, metric)] =
            value.mean();
      }
    }
  }
  return result;
}

}  // namespace ferry::trainer
