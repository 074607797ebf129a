// What the trainer computes, as JSON, for tests/interop/test_trainer.py to hold beside its peers:
//   trainer_tool schedule STYLE WSD_STYLE WARMUP DECAY WSD_DECAY WD_STYLE WD_STEPS   rates of every step
//   trainer_tool adam STEPS DECOUPLED             parameters, gradients and what Adam makes of them
//   trainer_tool order STAGES STAGE CHUNKS MICRO_BATCHES FORWARD_ONLY
//   trainer_tool resave FROM TO TP PP EP ETP DP HF   a training run, through the memory of a mesh; HF: config.json's
//                                                    folder
#include <ATen/ATen.h>

#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "converter/checkpoint.h"
#include "distckpt/error.h"
#include "models/pipeline_forward.h"
#include "models/world.h"
#include "trainer/kernels/adam.h"
#include "trainer/optimizer_param_scheduler.h"
#include "trainer/pipeline_order.h"
#include "trainer/training_checkpoint.h"

namespace ferry::trainer {
namespace {

using nlohmann::json;
using Arguments = std::vector<std::string>;

std::int64_t number(const std::string& text) {
  return std::atoll(text.c_str());
}

json schedule(const Arguments& a) {
  const bool rises = a[5] != "constant";
  OptimizerParamScheduler scheduler({.init_lr = 1e-5,
                                     .max_lr = 1e-3,
                                     .min_lr = 1e-4,
                                     .lr_warmup_steps = number(a[2]),
                                     .lr_decay_steps = number(a[3]),
                                     .lr_decay_style = a[0],
                                     .wsd_decay_steps = number(a[4]),
                                     .lr_wsd_decay_style = a[1],
                                     .start_wd = 0.01,
                                     .end_wd = rises ? 0.1 : 0.01,
                                     .wd_incr_steps = number(a[6]),
                                     .wd_incr_style = a[5]});
  auto rates = json::array();
  for (std::int64_t step = 0; step < number(a[3]) + 10; ++step) {
    rates.push_back({scheduler.now().lr, scheduler.now().weight_decay});
    scheduler.step(1);
  }
  return rates;
}

json values(const at::Tensor& x) {
  return std::vector<float>(x.const_data_ptr<float>(), x.const_data_ptr<float>() + x.numel());
}

json adam(const Arguments& a) {
  constexpr std::int64_t kElements = 256;
  at::manual_seed(3);
  const AdamTensors t{.grad = at::empty({kElements}),
                      .master = at::randn({kElements}),
                      .exp_avg = at::zeros({kElements}),
                      .exp_avg_sq = at::zeros({kElements}),
                      .decays = at::ones({kElements / 64}, at::kByte)};
  json run{{"lr", 3e-3}, {"weight_decay", 0.1}, {"initial", values(t.master)}};
  for (std::int64_t step = 1; step <= number(a[0]); ++step) {
    t.grad.copy_(at::randn({kElements}) * std::vector<double>{1, 1e-4, 100}[static_cast<std::size_t>(step % 3)]);
    adam_update(t, {.lr = 3e-3, .weight_decay = 0.1, .decoupled_weight_decay = a[1] == "1", .step = step});
    run["steps"].push_back({{"grad", values(t.grad)},
                            {"param", values(t.master)},
                            {"exp_avg", values(t.exp_avg)},
                            {"exp_avg_sq", values(t.exp_avg_sq)}});
  }
  return run;
}

json order(const Arguments& a) {
  const auto size = [&](std::size_t i) { return static_cast<std::size_t>(number(a[i])); };
  auto steps = json::array();
  for (const auto& step : pipeline_order({size(0), size(1), size(2), size(3), a[4] == "1"}))
    steps.push_back({step.forward, step.micro_batch, step.chunk});
  return steps;
}

// What DistributedOptimizer has after a load, saved anew.
json resave(const Arguments& a) {
  const auto size = [&](std::size_t i) { return static_cast<int>(number(a[i])); };
  const distckpt::ParallelConfig parallel{.tensor_model_parallel_size = size(2),
                                          .pipeline_model_parallel_size = size(3),
                                          .expert_model_parallel_size = size(4),
                                          .expert_tensor_parallel_size = size(5),
                                          .make_vocab_size_divisible_by = 256 / size(2)};
  const auto origin = converter::open(a[0], {.hf_config = a[7]});
  models::run_ranks(size(2) * size(3) * size(6), {}, [&](models::World& world) {
    const models::ParallelState mesh(world, parallel, "mesh");
    const auto chunks = models::make_stage(origin.map.config, mesh, {});
    std::vector<models::GPTModel*> pointers;
    for (const auto& chunk : chunks) pointers.push_back(chunk.get());
    DistributedDataParallel ddp(pointers, {.bucket_size = 5000});
    DistributedOptimizer optimizer(ddp, {});
    // Megatron-Core tells groups of parameters apart by their rates: those of the fixtures.
    OptimizerParamScheduler scheduler({.max_lr = 1e-2, .min_lr = 1e-4});
    TrainingCheckpoint from(pointers, optimizer, scheduler, {.root = a[0], .hf_config = a[7], .threads = 1});
    const auto resumed = from.load();
    TrainingCheckpoint to(pointers, optimizer, scheduler, {.root = a[1], .origin = &origin, .threads = 1});
    to.save(resumed.iteration, resumed.caller);
  });
  return {};
}

}  // namespace
}  // namespace ferry::trainer

int main(int argc, char** argv) {
  using namespace ferry;
  const std::string what = argc > 1 ? argv[1] : "";
  const std::vector<std::string> arguments(argv + std::min(argc, 2), argv + argc);
  try {
    nlohmann::json result;
    if (what == "schedule" && arguments.size() == 7)
      result = trainer::schedule(arguments);
    else if (what == "adam" && arguments.size() == 2)
      result = trainer::adam(arguments);
    else if (what == "order" && arguments.size() == 5)
      result = trainer::order(arguments);
    else if (what == "resave" && arguments.size() == 8)
      result = trainer::resave(arguments);
    else
      return 2;
    std::printf("%s\n", result.dump().c_str());
  } catch (const Error& error) {
    std::fputs(error.report().c_str(), stderr);
    return 2;
  }
  return 0;
}
