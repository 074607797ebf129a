// What the trainer computes, as JSON, for tests/interop/test_trainer.py to hold beside its peers:
//   trainer_tool schedule STYLE WSD_STYLE WARMUP DECAY WSD_DECAY WD_STYLE WD_STEPS   rates of every step
//   trainer_tool adam STEPS DECOUPLED             parameters, gradients and what Adam makes of them
//   trainer_tool order STAGES STAGE CHUNKS MICRO_BATCHES FORWARD_ONLY
#include <ATen/ATen.h>

#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "distckpt/error.h"
#include "trainer/kernels/adam.h"
#include "trainer/optimizer_param_scheduler.h"
#include "trainer/pipeline_order.h"

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
    else
      return 2;
    std::printf("%s\n", result.dump().c_str());
  } catch (const Error& error) {
    std::fputs(error.report().c_str(), stderr);
    return 2;
  }
  return 0;
}
