// Runs parts of the trainer and prints JSON, which tests/interop (test_trainer.py,
// test_load_balancing.py, test_training_state.py) compares with the results of their peers:
//
//   trainer_tool schedules [[STYLE, WSD_STYLE, WARMUP, DECAY, WSD_DECAY, WD_STYLE, WD_STEPS], ...]
//     the rates of every step of each schedule
//
//   trainer_tool adam STEPS DECOUPLED
//     parameters, gradients and Adam's results
//
//   trainer_tool orders [[STAGES, STAGE, CHUNKS, MICRO_BATCHES, FORWARD_ONLY], ...]
//     the passes of each given stage
//
//   trainer_tool balance FILE
//     losses, gradients and biases of the routers of each case in the file
//
//   trainer_tool resave FROM TO TP PP EP ETP DP HF
//     a training run, loaded into the memory of a mesh and saved; HF: the folder of config.json
//
//   trainer_tool train DEVICE DTYPE STEPS TP PP VPP EP
//     losses and norms of a small model, as one rank of the run that torchrun's variables describe;
//     the same for every mesh but for rounding
#include <ATen/ATen.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "converter/open/checkpoint.h"
#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "models/distributed/world.h"
#include "models/pipeline_forward.h"
#include "tests/support/models/tiny_training.h"
#include "trainer/engine/micro_batches.h"
#include "trainer/engine/pipeline/load_balancing.h"
#include "trainer/engine/pipeline/pipeline_schedule.h"
#include "trainer/engine/training_checkpoint.h"
#include "trainer/optimizer/kernels/adam.h"
#include "trainer/optimizer/offload.h"
#include "trainer/optimizer/optimizer_param_scheduler.h"
#include "trainer/plan/pipeline_order.h"

namespace ferry::trainer {
namespace {

using nlohmann::json;
using Arguments = std::vector<std::string>;

std::int64_t number(const std::string& text) {
  return std::atoll(text.c_str());
}

json schedule(const json& a) {
  const auto wd_incr_style = parse_choice<WdIncrStyle>("wd_incr_style", a[5].get<std::string>());
  OptimizerParamScheduler scheduler(
      {.init_lr = 1e-5,
       .max_lr = 1e-3,
       .min_lr = 1e-4,
       .lr_warmup_steps = a[2],
       .lr_decay_steps = a[3],
       .lr_decay_style = parse_choice<LrDecayStyle>("lr_decay_style", a[0].get<std::string>()),
       .wsd_decay_steps = a[4],
       .lr_wsd_decay_style =
           parse_choice<WsdDecayStyle>("lr_wsd_decay_style", a[1].get<std::string>()),
       .start_wd = 0.01,
       .end_wd = wd_incr_style == WdIncrStyle::kConstant ? 0.01 : 0.1,
       .wd_incr_steps = a[6],
       .wd_incr_style = wd_incr_style});
  auto rates = json::array();
  for (std::int64_t step = 0; step < a[3].get<std::int64_t>() + 10; ++step) {
    rates.push_back({scheduler.now().lr, scheduler.now().weight_decay});
    scheduler.step(1);
  }
  return rates;
}

json values(const at::Tensor& x) {
  const auto wide = x.to(at::kFloat);
  return std::vector<float>(wide.const_data_ptr<float>(), wide.const_data_ptr<float>() + x.numel());
}

json adam(const Arguments& a) {
  constexpr std::int64_t kElements = 256;
  const auto moments = a[2] == "bf16" ? at::kBFloat16 : at::kFloat;
  at::manual_seed(3);
  const AdamTensors t{.grad = at::empty({kElements}),
                      .master = at::randn({kElements}),
                      .exp_avg = at::zeros({kElements}, moments),
                      .exp_avg_sq = at::zeros({kElements}, moments),
                      .decays = at::ones({kElements / 64}, at::kByte)};
  json run{{"lr", 3e-3}, {"weight_decay", 0.1}, {"initial", values(t.master)}};
  for (std::int64_t step = 1; step <= number(a[0]); ++step) {
    t.grad.copy_(at::randn({kElements}) *
                 std::vector<double>{1, 1e-4, 100}[static_cast<std::size_t>(step % 3)]);
    adam_update(
        t, {.lr = 3e-3, .weight_decay = 0.1, .decoupled_weight_decay = a[1] == "1", .step = step});
    run["steps"].push_back({{"grad", values(t.grad)},
                            {"param", values(t.master)},
                            {"exp_avg", values(t.exp_avg)},
                            {"exp_avg_sq", values(t.exp_avg_sq)}});
  }
  return run;
}

json order(const json& a) {
  auto steps = json::array();
  for (const auto& step : pipeline_order({.stages = a[0],
                          .stage = a[1],
                          .chunks = a[2],
                          .micro_batches = a[3],
                          .forward_only = a[4] == 1}))
    steps.push_back({step.forward, step.micro_batch, step.chunk});
  return steps;
}

at::Tensor matrix(const json& rows) {
  std::vector<at::Tensor> stacked;
  for (const auto& row : rows) stacked.push_back(at::tensor(row.get<std::vector<float>>()));
  return at::stack(stacked);
}

json values(const std::vector<at::Tensor>& rows) {
  auto all = json::array();
  for (const auto& row : rows) all.push_back(values(row.contiguous()));
  return all;
}

// A case: tp, cp, dp, topk, score_function, coeffs [aux, seq, global, z], micro_batches [{lengths,
// logits [tokens, experts]}], the i-th of which is of rank i % dp; and, of the update of a bias,
// tokens_per_expert, expert_bias, rate.
json balance(const json& a) {
  const auto& coeffs = a.at("coeffs");
  const auto dp = a.at("dp").get<std::size_t>();
  const auto& all = a.at("micro_batches");
  models::TransformerConfig config;
  config.num_layers = 1;
  config.num_moe_experts = static_cast<std::int64_t>(all[0].at("logits")[0].size());
  config.moe_layer_freq = {true};
  config.moe_router_topk = a.at("topk");
  const auto score_function = a.at("score_function").get<std::string>();
  config.moe_router_score_function = find_in(models::kScoreFunctions, score_function).value();
  json result{{"gradients", std::vector<json>(all.size())}};
  std::mutex mutex;
  const models::ParallelConfig parallel{.tensor_model_parallel_size = a.at("tp"),
                                        .context_parallel_size = a.at("cp")};
  const auto ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size;
  models::run_ranks(ranks * static_cast<int>(dp), {}, [&](models::World& world) {
    const models::ParallelState mesh(world, parallel, "mesh");
    const auto& tp = mesh.tp();
    std::vector<std::size_t> mine;
    std::vector<models::SequencePartition> batches;
    for (auto i = static_cast<std::size_t>(mesh.coordinates().dp); i < all.size(); i += dp) {
      std::vector<at::Tensor> sequences;
      for (const std::int64_t length : all[i].at("lengths"))
        sequences.push_back(at::zeros({length}, at::kLong));
      batches.emplace_back(models::pack(sequences), mesh);
      mine.push_back(i);
    }
    LoadBalancing balancing(config, mesh,
                            {.aux_loss_coeff = coeffs[0],
                             .seq_aux_loss_coeff = coeffs[1],
                             .global_aux_loss_coeff = coeffs[2],
                             .z_loss_coeff = coeffs[3]});
    balancing.begin(batches, 1);
    for (std::size_t i = 0; i < batches.size(); ++i) {
      const auto local = batches[i].local(matrix(all[mine[i]].at("logits")));
      const auto rows = local.size(0) / tp.size();
      const auto logits = local.narrow(0, tp.rank() * rows, rows).clone().requires_grad_();
      const auto [best, chosen] = at::topk(logits, config.moe_router_topk, -1);
      const auto weights =
          balancing.hook(i)(0, {.experts = chosen, .weights = best, .logits = logits});
      require(at::equal(weights, best), ErrorKind::kBug, "the weights have changed");
      (weights * 0).sum().backward();
      const auto whole = batches[i]
                             .in_pack_order(mesh.cp().all_gather(tp.all_gather(logits.grad())))
                             .narrow(0, 0, batches[i].num_tokens());
      const std::lock_guard lock(mutex);
      result["gradients"][mine[i]] = values(whole.unbind());
    }
    const auto metrics = balancing.finish({}, false);
    const std::lock_guard lock(mutex);
    result["metrics"] = metrics;
  });
  const auto loads = at::tensor(a.at("tokens_per_expert").get<std::vector<std::int64_t>>());
  const auto bias = at::tensor(a.at("expert_bias").get<std::vector<float>>());
  result["expert_bias"] = values(get_updated_expert_bias(loads, bias, a.at("rate")));
  return result;
}

json of_each(const std::string& cases, json (*compute)(const json&)) {
  auto results = json::array();
  for (const auto& one : json::parse(cases)) results.push_back(compute(one));
  return results;
}

// Loads a training run into DistributedOptimizer and saves it again.
json resave(const Arguments& a) {
  const auto size = [&](std::size_t i) { return static_cast<int>(number(a[i])); };
  const models::ParallelConfig parallel{.tensor_model_parallel_size = size(2),
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
    TrainingCheckpoint from(world, pointers, optimizer, scheduler,
                            {.root = a[0], .hf_config = a[7], .threads = 1});
    const auto resumed = from.load();
    TrainingCheckpoint to(world, pointers, optimizer, scheduler,
                          {.root = a[1], .origin = &origin, .threads = 1});
    to.save(resumed.iteration, resumed.caller);
  });
  return {};
}

json train(const Arguments& a) {
  const auto size = [&](std::size_t i) { return static_cast<int>(number(a[i])); };
  models::ParallelConfig parallel{.tensor_model_parallel_size = size(3),
                                  .pipeline_model_parallel_size = size(4),
                                  .expert_model_parallel_size = size(6),
                                  .expert_tensor_parallel_size = 1};
  if (size(5) > 1) parallel.virtual_pipeline_model_parallel_size = size(5);
  auto world = models::World::from_environment({.device = at::Device(a[0])});
  const models::ParallelState mesh(world, parallel, "mesh");
  const auto config = support::tiny_config({.family = size(6) > 1 ? "qwen2_moe" : "llama",
                                            .num_layers = 8,
                                            .head_dim = 64,
                                            .hidden = 256,
                                            .ffn = 512,
                                            .vocab = 1000,
                                            .experts = 8,
                                            .moe_ffn = 64,
                                            .shared_ffn = 64});
  const auto chunks =
      models::make_stage(config, mesh,
                         {.dtype = a[1] == "bf16" ? distckpt::DType::kBF16 : distckpt::DType::kF32,
                          .sequence_parallel = size(3) > 1});
  std::vector<models::GPTModel*> pointers;
  for (const auto& chunk : chunks) {
    support::fill_parameters(*chunk, 5);
    for (const auto& parameter : chunk->parameters().all()) {
      if (parameter.spec.shape.rank() > 1) parameter.value.mul_(0.1);
    }
    pointers.push_back(chunk.get());
  }
  DistributedDataParallel ddp(pointers, {.bucket_size = 100'000});
  DistributedOptimizer optimizer(ddp, {});
  const P2PCommunicator p2p(world, mesh, "p2p", chunks.size() > 1);
  Offload offload(pointers, &ddp);
  auto steps = json::array();
  for (int step = 1; step <= number(a[2]); ++step) {
    const auto begin = std::chrono::steady_clock::now();
    const auto all =
        support::random_sequences(std::vector<std::int64_t>(16, 128), config.vocab_size,
                                  1 + static_cast<std::uint64_t>(step % 2));
    const auto dp = static_cast<std::size_t>(mesh.shape().dp());
    std::vector<at::Tensor> mine;
    for (auto i = static_cast<std::size_t>(mesh.coordinates().dp); i < all.size(); i += dp)
      mine.push_back(all[i]);
    const auto batches = pack_micro_batches(mine, split_micro_batches(mine.size(), 2), mesh);
    optimizer.zero_grad();
    const auto metrics = forward_backward(
        {pointers, &p2p, &ddp}, batches,
        [&](const models::GPTModel& model, const at::Tensor& hidden, std::size_t i) {
          const auto loss = support::token_loss(model, hidden, batches[i], 16 * 128);
          return LossOutput{.loss = loss, .metrics = {{"loss", loss.detach()}}};
        });
    auto loss = at::zeros({1}, at::TensorOptions().dtype(at::kDouble).device(world.device()));
    if (mesh.coordinates().tp == 0) {
      for (const auto& metric : metrics) loss += metric.at("loss").to(at::kDouble);
    }
    const auto report = optimizer.step({.lr = 1e-3, .weight_decay = 0.1});
    steps.push_back(
        {{"loss", mesh.all().all_reduce(loss).item<double>()},
         {"grad_norm", report.grad_norm},
         {"seconds",
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()}});
    const OffloadFlags all_of_it{.param = true, .grad = true};
    offload.to_host(all_of_it);
    offload.to_device(all_of_it);
  }
  mesh.all().barrier();
  return world.rank() == 0 ? steps : json();
}

}  // namespace
}  // namespace ferry::trainer

int main(int argc, char** argv) {
  using namespace ferry;
  const std::string what = argc > 1 ? argv[1] : "";
  const std::vector<std::string> arguments(argv + std::min(argc, 2), argv + argc);
  try {
    nlohmann::json result;
    if (what == "schedules" && arguments.size() == 1)
      result = trainer::of_each(arguments[0], trainer::schedule);
    else if (what == "adam" && arguments.size() == 3)
      result = trainer::adam(arguments);
    else if (what == "orders" && arguments.size() == 1)
      result = trainer::of_each(arguments[0], trainer::order);
    else if (what == "balance" && arguments.size() == 1)
      result = trainer::of_each(distckpt::read_text(arguments[0]), trainer::balance);
    else if (what == "resave" && arguments.size() == 8)
      result = trainer::resave(arguments);
    else if (what == "train" && arguments.size() == 7)
      result = trainer::train(arguments);
    else
      return 2;
    std::printf("%s\n", result.dump().c_str());
  } catch (const Error& error) {
    std::fputs(error.report().c_str(), stderr);
    return 2;
  }
  return 0;
}
