// One forward pass, and one with its backward, of a model with random weights on one device: time,
// share of the device's bf16 rate, peak memory. Prints a JSON object for each mode. Beside it:
// tests/bench/hf_model_bench.py, the same with transformers.
//   model_bench CONFIG_FOLDER TOKENS SEQUENCES [cpu|cuda] [ROUNDS] [TRACE_PREFIX]
// With TRACE_PREFIX one more round of each mode is written as a Chrome trace, PREFIX-MODE.json.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "converter/checkpoint.h"
#include "converter/hf_config.h"
#include "distckpt/error.h"
#include "distckpt/file_io.h"
#include "models/device.h"
#include "models/pipeline_forward.h"
#include "models/world.h"

namespace ferry {
namespace {

using models::Alignment;

struct Mode {
  std::string name;
  Alignment alignment;
  bool deterministic;
};

double multiply_adds(const models::GPTModel& model, std::int64_t tokens, std::int64_t length) {
  double weights = 0;
  for (const auto& parameter : model.parameters().all()) {
    if (parameter.spec.shape.rank() == 2 &&
        (parameter.spec.key != "embedding.word_embeddings.weight" ||
         !model.config().untie_embeddings_and_output_weights))
      weights += static_cast<double>(parameter.spec.shape.product());
  }
  const auto& config = model.config();
  const double attention = static_cast<double>(config.num_layers * config.num_attention_heads *
                                               config.kv_channels * length);  // causal: half of both
  return static_cast<double>(tokens) * (weights + attention);
}

void write_trace(const std::function<void()>& body, at::Device device, const std::string& file) {
  namespace profiler = torch::autograd::profiler;
  const std::set<torch::profiler::impl::ActivityType> activities{torch::profiler::impl::ActivityType::CPU,
                                                                 torch::profiler::impl::ActivityType::CUDA};
  const profiler::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  body();
  models::synchronize(device);
  profiler::disableProfiler()->save(file);
}

void run(const distckpt::TransformerConfig& config,
         Mode mode,
         at::Device device,
         std::int64_t tokens,
         std::int64_t sequences,
         int rounds,
         const std::string& trace_prefix) {
  models::World world(models::World::Options{.device = device});
  const models::ParallelState mesh(world, {}, "bench");
  const auto chunks = models::make_stage(
      config, mesh, {.alignment = mode.alignment, .deterministic_mode = mode.deterministic});
  auto& model = *chunks.front();
  at::manual_seed(1);
  for (const auto& leaf : model.parameters().leaves()) {
    auto value = leaf.value.detach();
    value.dim() == 1 ? value.fill_(1) : value.normal_(0, 0.02);
  }
  std::vector<at::Tensor> parts;
  for (std::int64_t i = 0; i < sequences; ++i)
    parts.push_back(at::randint(config.vocab_size, {tokens / sequences}, at::kLong));
  const models::SequencePartition batch(models::pack(parts), mesh);
  const auto labels = at::randint(config.vocab_size, {tokens}, at::TensorOptions(at::kLong).device(device));
  const auto token_weights = at::full({tokens}, 1.0 / static_cast<double>(tokens), at::TensorOptions(at::kFloat).device(device));
  const auto measure = [&](auto&& body) {
    double best = 1e30;
    for (int round = 0; round <= rounds; ++round) {
      models::synchronize(device);
      const auto start = std::chrono::steady_clock::now();
      body();
      models::synchronize(device);
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
      if (round > 0) best = std::min(best, seconds.count());  // the first chooses kernels
    }
    return best;
  };
  const double forward = measure([&] {
    const c10::InferenceMode no_gradients;
    (void)model.output(model.forward(batch));
  });
  models::reset_peak_memory(device);
  const auto step = [&] {
    for (const auto& leaf : model.parameters().leaves()) leaf.value.mutable_grad() = at::Tensor();
    model.cross_entropy(model.forward(batch), labels, token_weights).loss.backward();
  };
  const double both = measure(step);
  if (!trace_prefix.empty()) write_trace(step, device, fmt::format("{}-{}.json", trace_prefix, mode.name));
  const double flops = 2 * multiply_adds(model, tokens, tokens / sequences);
  const auto rate = [&](double factor, double seconds) { return factor * flops / seconds / 1e12; };
  fmt::print("{}\n", nlohmann::ordered_json{
                         {"program", "ferry"},
                         {"mode", mode.name},
                         {"forward_ms", 1e3 * forward},
                         {"forward_tflops", rate(1, forward)},
                         {"forward_backward_ms", 1e3 * both},
                         {"forward_backward_tflops", rate(3, both)},
                         {"tokens_per_second", static_cast<double>(tokens) / both},
                         {"peak_gib", static_cast<double>(models::peak_memory(device)) / (1LL << 30)}}
                         .dump());
}

}  // namespace
}  // namespace ferry

int main(int argc, char** argv) {
  using namespace ferry;
  if (argc < 4) return 2;
  try {
    const auto config = converter::parse_hf_config(distckpt::read_text(std::filesystem::path(argv[1]) / "config.json", 1 << 20), argv[1]);
    const at::Device device(argc > 4 ? argv[4] : "cpu");
    for (const auto& mode : {Mode{"fast", Alignment::kFast, false},
                             Mode{"fast-deterministic", Alignment::kFast, true},
                             Mode{"bitwise", Alignment::kBitwise, true}}) {
      run(config, mode, device.is_cuda() ? at::Device(at::kCUDA, 0) : device,
          std::atoll(argv[2]), std::atoll(argv[3]), argc > 5 ? std::atoi(argv[5]) : 5,
          argc > 6 ? argv[6] : "");
    }
  } catch (const Error& error) {
    std::fputs(error.report().c_str(), stderr);
    return 2;
  } catch (const std::exception& error) {
    std::fputs(error.what(), stderr);
    return 2;
  }
}
