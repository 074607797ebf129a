// torchrun --no-python --nproc-per-node 2 -- peer_bench: collectives of messages in a CUDA
// graph, by NCCL and through the memory of the other GPUs, in microseconds each.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

#include "models/distributed/process_group.h"
#include "models/distributed/world.h"
#include "models/kernels/cuda/cuda_call.h"

namespace ferry::models {
namespace {

double microseconds(const ProcessGroup& group, const std::function<void()>& body) {
  constexpr int kInGraph = 50;
  constexpr int kReplays = 10;
  body();
  at::cuda::CUDAGraph graph;
  {
    check(cudaStreamSynchronize(stream()));
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
    graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    for (int i = 0; i < kInGraph; ++i) body();
    graph.capture_end();
  }
  cudaEvent_t begin{};
  cudaEvent_t end{};
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  graph.replay();
  group.barrier();
  check(cudaEventRecord(begin, stream()));
  for (int i = 0; i < kReplays; ++i) graph.replay();
  check(cudaEventRecord(end, stream()));
  check(cudaEventSynchronize(end));
  float elapsed = 0;
  check(cudaEventElapsedTime(&elapsed, begin, end));
  group.barrier();
  return static_cast<double>(elapsed) * 1e3 / kInGraph / kReplays;
}

void run(World& world) {
  const at::NoGradGuard no_grad;
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  const ProcessGroup nccl(world, "nccl", ranks);
  const ProcessGroup peers(world, "peers", ranks);
  peers.map_peer_memory();
  if (world.rank() == 0)
    fmt::print("rows of 4096   all_reduce: NCCL  peers   all_gather_channels: NCCL  peers\n");
  for (const std::int64_t rows : {1, 4, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384}) {
    const auto mine =
        at::randn({rows, 4096}, at::TensorOptions().device(world.device()).dtype(at::kBFloat16));
    const auto measured = [&](const auto& of) {
      return std::pair(microseconds(nccl, [&] { of(nccl); }),
                       microseconds(peers, [&] { of(peers); }));
    };
    const auto reduce = measured([&](const ProcessGroup& group) { (void)group.all_reduce(mine); });
    const auto gather =
        measured([&](const ProcessGroup& group) { (void)group.all_gather_channels(mine); });
    if (world.rank() == 0)
      fmt::print("{:12} {:18.1f} {:6.1f} {:27.1f} {:6.1f}\n", rows, reduce.first, reduce.second,
                 gather.first, gather.second);
  }
  // Results of eight choices of each row, of experts that lie anywhere.
  if (world.rank() == 0) fmt::print("rows of 2048   all_to_all_rows: NCCL  peers\n");
  for (const std::int64_t rows : {16, 64, 256}) {
    const auto options = at::TensorOptions().device(world.device());
    at::manual_seed(1);
    const auto owners = at::randint(world.size(), {rows * 8 * world.size()}, options);
    const auto is_mine = owners.eq(world.rank());
    const auto mine = at::randn({owners.size(0), 2048}, options.dtype(at::kBFloat16));
    const auto order = at::argsort(is_mine.logical_not().to(at::kInt), /*stable=*/true);
    const auto places = at::argsort(order);
    const auto end = is_mine.sum().to(at::kInt).view({1});
    const auto of = [&](const ProcessGroup& group) {
      return microseconds(group, [&] { (void)group.all_to_all_rows(mine, places, end); });
    };
    const auto by_nccl = of(nccl);
    const auto by_peers = of(peers);
    if (world.rank() == 0) fmt::print("{:12} {:23.1f} {:6.1f}\n", rows, by_nccl, by_peers);
  }
  peers.barrier();
}

}  // namespace
}  // namespace ferry::models

int main() {
  try {
    auto world = ferry::models::World::from_environment({.device = at::Device(at::kCUDA)});
    ferry::models::run(world);
  } catch (const ferry::Error& error) {
    std::fputs(error.report().c_str(), stderr);
    return 2;
  }
}
