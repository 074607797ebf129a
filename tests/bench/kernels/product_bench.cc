// product_bench: products of 1 to 4 rows with weights of several shapes on a GPU, by ATen and by
// few_rows_product(), in a CUDA graph, in microseconds, and GB/s of the weights, which are too many
// for the caches. Products of routers in fp32, of bf16: by ATen with its copies to fp32, in fast
// and in bitwise.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "models/kernels/cuda/cuda_call.h"
#include "models/kernels/product/few_rows.h"
#include "models/kernels/product/linear.h"

namespace ferry::models {
namespace {

double microseconds(const std::vector<at::Tensor>& weights,
                    const std::function<void(const at::Tensor&)>& body) {
  constexpr int kRepeats = 5;
  const auto side = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(side);
  for (const auto& weight : weights) body(weight);
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  for (const auto& weight : weights) body(weight);
  graph.capture_end();
  graph.replay();
  cudaEvent_t begin{};
  cudaEvent_t end{};
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  check(cudaEventRecord(begin, side));
  for (int i = 0; i < kRepeats; ++i) graph.replay();
  check(cudaEventRecord(end, side));
  check(cudaEventSynchronize(end));
  float elapsed = 0;
  check(cudaEventElapsedTime(&elapsed, begin, end));
  return static_cast<double>(elapsed) * 1e3 / kRepeats / static_cast<double>(weights.size());
}

void run(std::int64_t n, std::int64_t k) {
  const at::NoGradGuard no_grad;
  constexpr std::int64_t kBytes = std::int64_t{1} << 30;  // of all weights
  const auto like = at::TensorOptions().device(at::kCUDA).dtype(at::kBFloat16);
  const auto bytes = n * k * 2;
  std::vector<at::Tensor> weights;
  for (std::int64_t i = 0; i < std::max<std::int64_t>(4, kBytes / bytes); ++i)
    weights.push_back(at::randn({n, k}, like));
  fmt::print("[{:6}, {:5}]", n, k);
  for (const std::int64_t rows : {1, 2, 3, 4}) {
    const auto x = at::randn({rows, k}, like);
    const auto theirs = microseconds(weights, [&](const at::Tensor& w) { at::linear(x, w); });
    const auto ours =
        microseconds(weights, [&](const at::Tensor& w) { few_rows_product(x, w, {}); });
    fmt::print("  {:6.1f} {:6.1f} ({:4.0f} GB/s)", theirs, ours,
               static_cast<double>(bytes) / ours / 1e3);
  }
  fmt::print("\n");
}

void run_router(std::int64_t n, std::int64_t k) {
  const at::NoGradGuard no_grad;
  const auto like = at::TensorOptions().device(at::kCUDA).dtype(at::kBFloat16);
  std::vector<at::Tensor> weights;
  for (int i = 0; i < 64; ++i) weights.push_back(at::randn({n, k}, like));
  fmt::print("[{:4}, {:5}]", n, k);
  for (const std::int64_t rows : {1, 4, 16, 64, 256, 1024, 8192}) {
    const auto x = at::randn({rows, k}, like);
    const auto of = [&](const auto& product) {
      return microseconds(weights, [&](const at::Tensor& w) { product(w); });
    };
    const auto theirs =
        of([&](const at::Tensor& w) { at::linear(x.to(at::kFloat), w.to(at::kFloat)); });
    const auto fast = of([&](const at::Tensor& w) { linear_in_fp32(x, w, Alignment::kFast); });
    const auto bitwise =
        of([&](const at::Tensor& w) { linear_in_fp32(x, w, Alignment::kBitwise); });
    fmt::print("  {}: {:.1f} {:.1f} {:.1f}", rows, theirs, fast, bitwise);
  }
  fmt::print("\n");
}

}  // namespace
}  // namespace ferry::models

int main() {
  fmt::print("routers [N, K], rows: ATen, fast, bitwise\n");
  for (const auto& [n, k] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {64, 2048}, {160, 5120}, {256, 7168}, {384, 7168}})
    ferry::models::run_router(n, k);
  fmt::print("[     N,     K]  of 1 to 4 rows: ATen, few_rows_product()\n");
  for (const auto& [n, k] : std::vector<std::pair<std::int64_t, std::int64_t>>{{2048, 4096},
                                                                               {5120, 2048},
                                                                               {2048, 2048},
                                                                               {4096, 2048},
                                                                               {8192, 2048},
                                                                               {2880, 4096},
                                                                               {5120, 2880},
                                                                               {4096, 4096},
                                                                               {6144, 4096},
                                                                               {24576, 4096},
                                                                               {4096, 12288},
                                                                               {1536, 1536},
                                                                               {896, 896},
                                                                               {4864, 896},
                                                                               {64, 2048},
                                                                               {151936, 2048}})
    ferry::models::run(n, k);
}
