#include "trainer/metrics/performance.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <numeric>
#include <optional>
#include <string_view>

#include "distckpt/base/error.h"

namespace ferry::trainer {
namespace {

constexpr double kGiB = 1 << 30;

// Tokens by which verl divides the time of a part; nothing where it does not.
std::optional<std::int64_t> tokens_of_part(std::string_view part, const StepCost& cost) {
  constexpr std::array<std::string_view, 5> kOfAllTokens{"ref", "values", "adv", "update_critic",
                                                         "update_actor"};
  if (part == "gen") return cost.response_tokens;
  if (std::ranges::find(kOfAllTokens, part) != kOfAllTokens.end()) return cost.tokens;
  return std::nullopt;
}

}  // namespace

Metrics performance_metrics(const StepCost& cost) {
  require(cost.seconds > 0 && cost.num_gpus > 0, ErrorKind::kBug, "a step of {} s on {} GPUs",
          cost.seconds, cost.num_gpus);
  const auto tokens = static_cast<double>(cost.tokens);
  Metrics metrics{
      {"perf/total_num_tokens", tokens},
      {"perf/time_per_step", cost.seconds},
      {"perf/throughput", tokens / (cost.seconds * cost.num_gpus)},
      {"perf/max_memory_allocated_gb", static_cast<double>(cost.max_memory_allocated) / kGiB},
      {"perf/max_memory_reserved_gb", static_cast<double>(cost.max_memory_reserved) / kGiB},
      {"perf/cpu_memory_used_gb", static_cast<double>(cost.cpu_memory_used) / kGiB}};
  for (const auto& [part, seconds] : cost.timing) {
    metrics["timing_s/" + part] = seconds;
    if (const auto count = tokens_of_part(part, cost))
      metrics["timing_per_token_ms/" + part] =
          *count > 0 ? seconds * 1000 / static_cast<double>(*count) : 0;
  }
  return metrics;
}

Metrics seqlen_metrics(std::span<const std::int64_t> tokens_of_ranks, const std::string& prefix) {
  require(!tokens_of_ranks.empty(), ErrorKind::kBug, "{}: of no ranks", prefix);
  const auto [least, most] = std::ranges::minmax(tokens_of_ranks);
  const auto sum = std::accumulate(tokens_of_ranks.begin(), tokens_of_ranks.end(), 0.0);
  return {{prefix + "/min", static_cast<double>(least)},
          {prefix + "/max", static_cast<double>(most)},
          {prefix + "/minmax_diff", static_cast<double>(most - least)},
          {prefix + "/mean", sum / static_cast<double>(tokens_of_ranks.size())}};
}

std::string host_name() {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  return name.data();
}

std::int64_t host_memory_used() {
  std::ifstream file("/proc/meminfo");
  std::map<std::string, std::int64_t> kib;
  std::string name;
  for (std::int64_t value = 0; file >> name >> value; file.ignore(64, '\n')) kib[name] = value;
  require(kib.contains("MemTotal:") && kib.contains("MemAvailable:"), ErrorKind::kIo,
          "/proc/meminfo: does not say what memory is available");
  return (kib["MemTotal:"] - kib["MemAvailable:"]) * 1024;
}

}  // namespace ferry::trainer
