#include "models/certificate/host_threads.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>

#include "distckpt/base/threads.h"
#include "models/distributed/world.h"
#include "models/spec/products.h"

namespace ferry::models {
namespace {

// The number of weights (n * k) of the largest product.
std::int64_t largest_product(const TransformerConfig& config) {
  std::int64_t most = 0;
  for (const auto& shape : gemm_shapes(config)) most = std::max(most, shape.n * shape.k);
  return most;
}

}  // namespace

int host_threads(int cores, int local_ranks, std::int64_t weights) {
  const auto of_rank = std::max(1, cores / std::max(1, local_ranks));
  const auto busy = std::max<std::int64_t>(1, weights / kWeightsOfThread);
  return static_cast<int>(std::min<std::int64_t>(of_rank, busy));
}

void choose_host_threads(const World& world, const TransformerConfig& config) {
  static std::mutex mutex;
  static int most = 0;
  if (std::getenv("OMP_NUM_THREADS") != nullptr) return;
  const auto cores = distckpt::available_cores();
  const std::lock_guard lock(mutex);
  most = std::max(most, host_threads(cores, world.local_size(), largest_product(config)));
  at::set_num_threads(most);
}

}  // namespace ferry::models
