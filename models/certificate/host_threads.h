// The number of threads that LibTorch takes on the host. Threads of OpenMP that find no core of
// their own, or less work than it takes to wake them, wait for each other longer than they compute.
#pragma once

#include <cstdint>

#include "models/spec/transformer_config.h"

namespace ferry::models {

class World;

// The threads of one rank: its share of the machine's `cores`, at most one for each
// kWeightsOfThread of `weights`, the size of the largest matrix of the model, and at least one.
inline constexpr std::int64_t kWeightsOfThread = 1 << 18;
int host_threads(int cores, int local_ranks, std::int64_t weights);

// Sets LibTorch's number of threads in this process for a model that is about to be made. Never
// lowers it below the number that an earlier model needs, and leaves it alone where OMP_NUM_THREADS
// is set. Results of kBitwise do not depend on it.
void choose_host_threads(const World& world, const TransformerConfig& config);

}  // namespace ferry::models
