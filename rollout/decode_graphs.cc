#include "rollout/decode_graphs.h"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <bit>
#include <map>
#include <utility>

#include "distckpt/base/integers.h"

namespace ferry::rollout {
namespace {

// Small batches are rounded up to powers of two, others to whole steps.
constexpr std::int64_t kStep = 16;

// Ends a capture that an error has left open: the stream and the allocator take other work again.
void end_broken(at::cuda::CUDAGraph& graph, at::cuda::MempoolId_t pool) {
  try {
    graph.capture_end();
  } catch (const c10::Error&) {
    (void)cudaGetLastError();
    try {  // capture_end() throws before this, or behind it
      c10::cuda::CUDACachingAllocator::endAllocateToPool(c10::cuda::current_device(), pool);
    } catch (const c10::Error&) {
    }
  }
}

}  // namespace

struct DecodeGraphs::Graphs {
  struct Captured {
    at::cuda::CUDAGraph graph{};
    DecodedRows result{};
  };

  // One pool for all graphs, because only one of them runs at a time.
  at::cuda::MempoolId_t pool = at::cuda::graph_pool_handle();
  std::map<std::int64_t, std::unique_ptr<Captured>> of_rows;  // whole ones
};

DecodeGraphs::DecodeGraphs(std::function<DecodedRows(std::int64_t rows)> forward)
    : forward_(std::move(forward)), graphs_(std::make_unique<Graphs>()) {}

DecodeGraphs::~DecodeGraphs() = default;

std::int64_t DecodeGraphs::bucket_of(std::int64_t rows) {
  if (rows < kStep)
    return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(rows)));
  return distckpt::round_up(rows, kStep);
}

DecodedRows DecodeGraphs::replay(std::int64_t rows) {
  const auto found = graphs_->of_rows.find(rows);
  if (found != graphs_->of_rows.end()) {
    found->second->graph.replay();
    return found->second->result;
  }
  const auto result = forward_(rows);  // loads and chooses kernels
  const auto compute = c10::cuda::getCurrentCUDAStream();
  const auto side = c10::cuda::getStreamFromPool();
  compute.synchronize();
  auto captured = std::make_unique<Graphs::Captured>();
  {
    const c10::cuda::CUDAStreamGuard guard(side);
    // Other threads ask for the state of collectives meanwhile.
    captured->graph.capture_begin(graphs_->pool, cudaStreamCaptureModeThreadLocal);
    try {
      captured->result = forward_(rows);
      captured->graph.capture_end();
    } catch (...) {
      end_broken(captured->graph, graphs_->pool);
      // A pool that no graph holds any more takes none.
      if (graphs_->of_rows.empty()) graphs_->pool = at::cuda::graph_pool_handle();
      throw;
    }
  }
  graphs_->of_rows.emplace(rows, std::move(captured));
  return result;
}

}  // namespace ferry::rollout
