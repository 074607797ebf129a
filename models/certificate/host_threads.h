// How many threads LibTorch takes on the host. Threads of OpenMP that find no core of their own, or
// less work than it takes to wake them, wait for each other longer than they compute.
#pragma once

#include <cstdint>

#include "models/spec/transformer_config.h"

namespace ferry::models {

class World;

// Of each rank: the cores of a machine shared out among its ranks, and at most one for each
// kWeightsOfThread weights of the largest product with a weight, at least one.
inline constexpr std::int64_t kWeightsOfThread = 1 << 18;
int host_threads(int cores, int local_ranks, std::int64_t weights);

// Takes so many in this process for a model that is about to be made, or as many as one made before
// it needs, if that is more. OMP_NUM_THREADS is somebody's own choice, and stays. Results of
// kBitwise do not depend on it.
void choose_host_threads(const World& world, const TransformerConfig& config);

}  // namespace ferry::models
