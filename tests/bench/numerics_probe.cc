// Prints the certificate of this machine (models/certificate/numerics_certificate.h) for the shapes
// of every family, as a table: a line for each operation and property, what does not hold, and how
// long a product without split-K takes beside the library's own choice.
//
//   numerics_probe [cpu|cuda] [bf16|fp32] [family ...]        fp32 is of the CPU
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "models/certificate/numerics_certificate.h"
#include "models/kernels/product/gemm.h"
#include "models/spec/products.h"

namespace ferry::models {
namespace {

using models::TransformerConfig;

TransformerConfig dense(std::int64_t hidden,
                        std::int64_t ffn,
                        std::int64_t heads,
                        std::int64_t groups,
                        std::int64_t channels,
                        std::int64_t vocab) {
  TransformerConfig config;
  config.num_layers = 1;
  config.hidden_size = hidden;
  config.ffn_hidden_size = ffn;
  config.num_attention_heads = heads;
  config.num_query_groups = groups;
  config.kv_channels = channels;
  config.vocab_size = vocab;
  return config;
}

TransformerConfig with_experts(TransformerConfig config,
                               std::int64_t experts,
                               std::int64_t ffn,
                               std::int64_t topk,
                               std::int64_t shared) {
  config.num_moe_experts = experts;
  config.moe_layer_freq = {true};
  config.moe_ffn_hidden_size = ffn;
  config.moe_router_topk = topk;
  config.moe_shared_expert_intermediate_size = shared;
  return config;
}

TransformerConfig with_latent_attention(TransformerConfig config, std::int64_t q_lora_rank) {
  config.multi_latent_attention = true;
  config.q_lora_rank = q_lora_rank;
  config.kv_lora_rank = 512;
  config.qk_head_dim = 128;
  config.qk_pos_emb_head_dim = 64;
  config.v_head_dim = 128;
  return config;
}

// A model of each family that people train.
std::map<std::string, TransformerConfig> families() {
  std::map<std::string, TransformerConfig> configs;
  configs["llama"] = dense(4096, 14336, 32, 8, 128, 128256);
  configs["qwen2"] = dense(1536, 8960, 12, 2, 128, 151936);
  configs["qwen2"].add_qkv_bias = true;
  configs["qwen3"] = dense(1024, 3072, 16, 8, 128, 151936);
  configs["qwen3"].qk_layernorm = true;
  configs["mixtral"] = with_experts(dense(4096, 14336, 32, 8, 128, 32000), 8, 14336, 2, 0);
  configs["qwen2_moe"] = with_experts(dense(2048, 5632, 16, 16, 128, 151936), 60, 1408, 4, 5632);
  configs["qwen2_moe"].add_qkv_bias = true;
  configs["qwen2_moe"].moe_shared_expert_gate = true;
  configs["qwen3_moe"] = with_experts(dense(2048, 6144, 32, 4, 128, 151936), 128, 768, 8, 0);
  configs["qwen3_moe"].qk_layernorm = true;
  configs["deepseek_v2"] = with_latent_attention(
      with_experts(dense(2048, 10944, 16, 16, 128, 102400), 64, 1408, 6, 2816), 0);
  configs["deepseek_v3"] = with_latent_attention(
      with_experts(dense(7168, 18432, 128, 128, 128, 129280), 256, 2048, 8, 2048), 1536);
  for (auto& [family, config] : configs) config.family = family;
  return configs;
}

double microseconds(const std::function<void()>& run) {
  constexpr int kRuns = 20;
  const auto wait = [] { at::detail::getCUDAHooks().deviceSynchronize(0); };
  for (int i = 0; i < 3; ++i) run();
  wait();
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kRuns; ++i) run();
  wait();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
             .count() /
         kRuns;
}

// Time of gemm_nt over that of at::linear, which may split K. Weights rotate, as in a model.
void print_cost(const GemmShape& shape) {
  const auto like = at::TensorOptions().device(at::kCUDA).dtype(at::kBFloat16);
  const auto count = std::clamp<std::int64_t>((std::int64_t{1} << 27) / (shape.n * shape.k), 1, 16);
  std::vector<at::Tensor> weights;
  for (std::int64_t i = 0; i < count; ++i) weights.push_back(at::randn({shape.n, shape.k}, like));
  std::string line = fmt::format("time  {:34}", shape.subject());
  for (const std::int64_t rows : {16, 64, 128, 256, 1024, 4096}) {
    const auto x = at::randn({rows, shape.k}, like);
    std::size_t at_weight = 0;
    const auto next = [&]() -> const at::Tensor& { return weights[at_weight++ % weights.size()]; };
    const auto ours = microseconds([&] { gemm_nt(x, next(), {}); });
    const auto theirs = microseconds([&] { at::linear(x, next()); });
    line += fmt::format("  M={} {:.0f}/{:.0f}={:.2f}", rows, ours, theirs, ours / theirs);
  }
  fmt::print("{}\n", line);
}

int run(const std::vector<std::string>& arguments) {
  NumericsOptions options{.device = at::hasCUDA() ? at::kCUDA : at::kCPU};
  std::vector<std::string> wanted;
  for (const auto& argument : arguments) {
    if (argument == "cpu" || argument == "cuda")
      options.device = at::Device(argument);
    else if (argument == "bf16" || argument == "fp32")
      options.dtype = argument == "bf16" ? at::kBFloat16 : at::kFloat;
    else
      wanted.push_back(argument);
  }
  if (options.device.is_cpu()) options.most_columns = 4096;
  const auto ops = bitwise_ops(options.device);
  bool all = true;
  bool first = true;
  for (const auto& [family, config] : families()) {
    if (!wanted.empty() && std::ranges::find(wanted, family) == wanted.end()) continue;
    const auto certificate = certify_numerics(config, options, ops);
    if (std::exchange(first, false))
      for (const auto& [name, value] : certificate.environment) fmt::print("{}: {}\n", name, value);
    for (const auto& check : certificate.checks)
      fmt::print("{}  {:12} {:40} {:14} {}\n", check.passed ? "ok  " : "FAIL", family,
                 check.subject, check.property, check.detail);
    fmt::print("{} {} in {:.1f} s\n", family, certificate.passed() ? "PASS" : "FAIL",
               certificate.seconds);
    all = all && certificate.passed();
    if (options.device.is_cuda() && options.dtype == at::kBFloat16)
      for (const auto& shape : gemm_shapes(config)) print_cost(shape);
    std::fflush(stdout);
  }
  return all ? 0 : 1;
}

}  // namespace
}  // namespace ferry::models

int main(int argc, char** argv) {
  try {
    return ferry::models::run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    fmt::print(stderr, "error: {}\n", error.what());
    return 2;
  }
}
