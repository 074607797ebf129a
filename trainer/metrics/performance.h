// The cost of a step, in verl's metrics: tokens, time, memory (verl: trainer/ppo/metric_utils.py,
// compute_throughout_metrics and compute_timing_metrics; utils/seqlen_balancing.py,
// log_seqlen_unbalance).
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>

#include "trainer/metrics/metrics.h"

namespace ferry::trainer {

struct StepCost {
  double seconds = 0;
  std::int64_t tokens = 0;           // of the global batch, prompts included
  std::int64_t response_tokens = 0;  // those of them that were generated
  int num_gpus = 1;
  // Largest over the ranks, in bytes; 0 where there is no device.
  std::int64_t max_memory_allocated = 0;
  std::int64_t max_memory_reserved = 0;
  std::int64_t cpu_memory_used = 0;        // of the host
  std::map<std::string, double> timing{};  // seconds of the parts of the step: "update_actor"
};

// perf/total_num_tokens, perf/time_per_step, perf/throughput (tokens per second and GPU),
// perf/max_memory_allocated_gb, perf/max_memory_reserved_gb, perf/cpu_memory_used_gb (GiB, as
// verl), timing_s/<part> of every part, and timing_per_token_ms/<part> of those that verl has: gen
// by the tokens that were generated; ref, values, adv, update_critic and update_actor by all. 0
// where there are none.
Metrics performance_metrics(const StepCost& cost);

// <prefix>/min, max, minmax_diff, mean: tokens per data-parallel rank.
Metrics seqlen_metrics(std::span<const std::int64_t> tokens_of_ranks,
                       const std::string& prefix = "global_seqlen");

// The name of this host, as its own commands say it.
std::string host_name();

// All of the host's memory that is not available, in bytes. Throws Error(kIo | kCorrupt).
std::int64_t host_memory_used();

}  // namespace ferry::trainer
