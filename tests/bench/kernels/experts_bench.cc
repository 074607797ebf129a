// experts_bench [EXPERTS HIDDEN FFN TOPK [biases]]: the kernels of a mixture of experts on a GPU
// for 1 to 4,096 tokens, in microseconds: choosing with its product, both in one kernel, sorting,
// the products of few tokens with their sum, grouped products with the rows they take, kernels of
// our own for the same, combining. GB/s are of the weights of the experts that are chosen.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <cstdint>
#include <cstdlib>
#include <functional>

#include "models/kernels/cuda/cuda_call.h"
#include "models/kernels/experts/experts.h"
#include "models/kernels/swiglu.h"

namespace ferry::models {
namespace {

double microseconds(const std::function<void()>& body) {
  constexpr int kRepeats = 20;
  for (int i = 0; i < 3; ++i) body();
  cudaEvent_t begin{};
  cudaEvent_t end{};
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  check(cudaEventRecord(begin, stream()));
  for (int i = 0; i < kRepeats; ++i) body();
  check(cudaEventRecord(end, stream()));
  check(cudaEventSynchronize(end));
  float elapsed = 0;
  check(cudaEventElapsedTime(&elapsed, begin, end));
  return static_cast<double>(elapsed) * 1e3 / kRepeats;
}

void run(std::int64_t experts,
         std::int64_t hidden,
         std::int64_t ffn,
         std::int64_t topk,
         bool has_biases) {
  const at::NoGradGuard no_grad;
  const auto like = at::TensorOptions().device(at::kCUDA).dtype(at::kBFloat16);
  ExpertWeights weights{.fc1 = at::randn({experts, 2 * ffn, hidden}, like) / 32,
                        .fc2 = at::randn({experts, hidden, ffn}, like) / 32};
  if (has_biases) {
    weights.fc1_bias = at::randn({experts, 2 * ffn}, like);
    weights.fc2_bias = at::randn({experts, hidden}, like);
    weights.quick = QuickGeglu{.clamp = 7, .offset = 1};
  }
  const auto router = at::randn({experts, hidden}, like);
  fmt::print(
      "                bitwise                 bitwise\n"
      "tokens  choose   route   route    sort  summed  summed  grouped  (GB/s)     own  (GB/s)  "
      "combine\n");
  for (const std::int64_t tokens : {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096}) {
    const auto x = at::randn({tokens, hidden}, like);
    const auto logits = at::randn({tokens, experts}, like);
    const auto chosen = choose_experts(logits, topk, true, Alignment::kFast);
    const auto choices = chosen.experts.reshape({-1});
    const auto places = expert_order(choices, {0, experts});
    const auto active = std::get<0>(at::_unique(choices)).numel();
    const auto gigabytes = static_cast<double>(active * 3 * hidden * ffn * 2) / 1e9;
    const auto grouped = [&] {
      const auto rows = gather_choices(x, places, topk, choices.numel());
      const auto gate_up = at::_grouped_mm(rows, weights.fc1.transpose(1, 2), places.ends);
      const auto activated =
          has_biases ? quick_geglu(gate_up, {weights.fc1_bias, places.ends}, *weights.quick)
                     : swiglu(gate_up);
      const auto y = at::_grouped_mm(activated, weights.fc2.transpose(1, 2), places.ends);
      return has_biases ? add_expert_biases(y, {weights.fc2_bias, places.ends}) : y;
    };
    const auto results = grouped();
    double summed[2]{};  // fast, bitwise
    double routed[2]{};
    for (const auto alignment : {Alignment::kFast, Alignment::kBitwise}) {
      const auto i = alignment == Alignment::kFast ? 0 : 1;
      if (few_tokens_supported(weights, chosen.experts, alignment))
        summed[i] = microseconds([&] {
          apply_experts_to_few_tokens(x, chosen.experts, chosen.weights, weights, alignment);
        });
      if (few_routed_supported(x, router, topk, alignment))
        routed[i] = microseconds([&] { route_few(x, router, topk, true, alignment); });
    }
    double own = 0;
    if (serves_experts(weights, Alignment::kBitwise))
      own = microseconds([&] {
        expert_products(gated_expert_products(x, places, topk, weights), places.ends, weights.fc2,
                        weights.fc2_bias);
      });
    const auto all = microseconds([&] { grouped(); });
    const auto rate = [&](double taken) { return taken == 0 ? 0 : gigabytes / taken * 1e6; };
    fmt::print(
        "{:6} {:7.1f} {:7.1f} {:7.1f} {:7.1f} {:7.1f} {:7.1f} {:8.1f} {:7.0f} {:7.1f} {:7.0f} "
        "{:8.1f}\n",
        tokens,
        microseconds([&] { choose_experts(at::linear(x, router), topk, true, Alignment::kFast); }),
        routed[0], routed[1], microseconds([&] {
          expert_order(choices, {0, experts});
        }),
        summed[0], summed[1], all, rate(all), own, rate(own),
        microseconds([&] { combine_choices(results, places.inverse, chosen.weights); }));
  }
}

}  // namespace
}  // namespace ferry::models

int main(int argc, char** argv) {
  const auto argument = [&](int index, std::int64_t otherwise) {
    return argc > index ? std::atoll(argv[index]) : otherwise;
  };
  ferry::models::run(argument(1, 128), argument(2, 2048), argument(3, 768), argument(4, 8),
                     argc > 5);
}
