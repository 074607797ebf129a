#include "trainer/optimizer/distributed_optimizer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>

#include "distckpt/base/error.h"
#include "distckpt/plan/mesh_layout.h"
#include "models/distributed/world.h"
#include "models/pipeline_forward.h"
#include "tests/support/models/backward.h"
#include "tests/support/models/tiny_training.h"
#include "trainer/engine/micro_batches.h"
#include "trainer/optimizer/kernels/adam.h"

namespace ferry::trainer {
namespace distributed_optimizer_test {

using models::GPTModel;
using models::ParallelConfig;
using support::TinyModel;
using support::WholeTensors;

TEST(Buckets, KeepTheirOrderAndAreCutAtBlocksOnAllRanks) {
  const auto buckets = layout_buckets({{.leaf = 3, .size = 100},
                                       {.leaf = 2, .size = 64},
                                       {.leaf = 1, .size = 10},
                                       {.leaf = 0, .size = 500, .alone = true}},
                                      2, 150);
  EXPECT_EQ(buckets, (std::vector<BucketLayout>{
                         {.begin = 0, .end = 256, .slots = {{3, 0, 100}, {2, 128, 64}}},
                         {.begin = 256, .end = 384, .slots = {{1, 256, 10}}},
                         {.begin = 384, .end = 896, .slots = {{0, 384, 500}}}}));
  EXPECT_EQ(intersect({.leaf = 3, .begin = 10, .size = 20}, 15, 100), (BufferSlot{3, 15, 15}));
  EXPECT_LE(intersect({.leaf = 3, .begin = 10, .size = 20}, 40, 100).size, 0);
}

// Adam in fp64, as the paper and torch.optim.AdamW have it.
struct ExactAdam {
  at::Tensor param, m, v;
  void step(const at::Tensor& raw, const at::Tensor& decays, const AdamScalars& s) {
    auto grad = raw.to(at::kDouble) * s.grad_scale;
    if (s.decoupled_weight_decay)
      param = at::where(decays, param * (1 - s.lr * s.weight_decay), param);
    else
      grad = at::where(decays, grad + s.weight_decay * param, grad);
    m = s.beta1 * m + (1 - s.beta1) * grad;
    v = s.beta2 * v + (1 - s.beta2) * grad * grad;
    const auto step = static_cast<double>(s.step);
    const auto m_hat = m / (1 - std::pow(s.beta1, step));
    const auto v_hat = v / (1 - std::pow(s.beta2, step));
    param = param - s.lr * m_hat / (v_hat.sqrt() + s.eps);
  }
};

AdamTensors random_adam(std::int64_t elements, at::ScalarType param, at::ScalarType grad) {
  at::manual_seed(5);
  AdamTensors t{.grad = at::randn({elements}).to(grad),
                .master = at::randn({elements}),
                .exp_avg = at::zeros({elements}),
                .exp_avg_sq = at::zeros({elements}),
                .decays = at::arange(elements / 64).remainder(3).ne(0).to(at::kByte)};
  if (param != at::kFloat) t.param = at::empty({elements}, param);
  return t;
}

// Each step rounds the master once (2^-24 of it) and its change a few times.
TEST(Adam, IsExactToTheRoundingOfFp32) {
  for (const bool decoupled : {true, false}) {
    auto t = random_adam(640, at::kBFloat16, at::kFloat);
    ExactAdam exact{t.master.to(at::kDouble), at::zeros({640}, at::kDouble),
                    at::zeros({640}, at::kDouble)};
    const auto decays = t.decays.repeat_interleave(64).to(at::kBool);
    for (int step = 1; step <= 20; ++step) {
      t.grad.copy_(at::randn({640}) * (step % 4 == 0 ? 100 : 1));
      const AdamScalars scalars{.lr = 1e-2,
                                .weight_decay = 0.1,
                                .decoupled_weight_decay = decoupled,
                                .step = step,
                                .grad_scale = 0.5};
      adam_update(t, scalars);
      exact.step(t.grad, decays, scalars);
      const auto error = (t.master - exact.param).abs();
      const auto bound = step * (exact.param.abs() + 1) * 0x1p-24;
      EXPECT_TRUE((error <= bound).all().item<bool>())
          << step << ": " << (error / bound).max().item<double>();
      EXPECT_TRUE(at::equal(t.param, t.master.to(at::kBFloat16)));
    }
  }
}

TEST(Adam, TakesEveryPairOfDtypes) {
  for (const auto& [param, grad] :
       {std::pair(at::kFloat, at::kFloat), std::pair(at::kHalf, at::kFloat),
        std::pair(at::kHalf, at::kHalf), std::pair(at::kBFloat16, at::kBFloat16)}) {
    auto t = random_adam(128, param, grad);
    auto wide = t;
    wide.grad = t.grad.to(at::kFloat);
    wide.master = t.master.clone();
    wide.exp_avg = t.exp_avg.clone();
    wide.exp_avg_sq = t.exp_avg_sq.clone();
    wide.param = at::Tensor();
    adam_update(t, {.lr = 1e-3});
    adam_update(wide, {.lr = 1e-3});
    EXPECT_TRUE(at::equal(t.master, wide.master));
    EXPECT_TRUE(!t.param.defined() || at::equal(t.param, t.master.to(param)));
  }
  auto wrong = random_adam(128, at::kFloat, at::kFloat);
  wrong.decays = wrong.decays.narrow(0, 0, 1);
  EXPECT_THROW(adam_update(wrong, {}), Error);
}

// The update is that of fp32 moments of the same values; these are rounded when they are stored.
TEST(Adam, RoundsMomentsOnceWhenItStoresThem) {
  for (const auto& [first, second] :
       {std::pair(at::kBFloat16, at::kBFloat16), std::pair(at::kBFloat16, at::kFloat),
        std::pair(at::kFloat, at::kBFloat16)}) {
    auto t = random_adam(640, at::kBFloat16, at::kBFloat16);
    t.exp_avg = t.exp_avg.to(first);
    t.exp_avg_sq = t.exp_avg_sq.to(second);
    for (int step = 1; step <= 5; ++step) {
      t.grad.copy_(at::randn({640}));
      auto wide = t;
      wide.master = t.master.clone();
      wide.exp_avg = t.exp_avg.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
      wide.exp_avg_sq = t.exp_avg_sq.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
      wide.param = t.param.clone();
      adam_update(t, {.lr = 1e-2, .weight_decay = 0.1, .step = step});
      adam_update(wide, {.lr = 1e-2, .weight_decay = 0.1, .step = step});
      EXPECT_TRUE(at::equal(t.master, wide.master));
      EXPECT_TRUE(at::equal(t.param, wide.param));
      EXPECT_TRUE(at::equal(t.exp_avg, wide.exp_avg.to(first)));
      EXPECT_TRUE(at::equal(t.exp_avg_sq, wide.exp_avg_sq.to(second)));
    }
  }
}

TEST(Adam, SumsSquaresInFp64) {
  for (const std::int64_t elements : {0, 1, 7, 64, 65536, 200001}) {
    const auto x = at::randn({elements});
    const auto expected = x.to(at::kDouble).square().sum().item<double>();
    EXPECT_NEAR(squared_sum(x).item<double>(), expected, 1e-12 * (1 + expected));
  }
  auto x = at::full({1000}, std::numeric_limits<float>::max());
  EXPECT_TRUE(std::isfinite(squared_sum(x).item<double>()));
  x[999] = std::numeric_limits<float>::infinity();
  EXPECT_FALSE(std::isfinite(squared_sum(x).item<double>()));
}

// The kernels of a GPU beside the loops of the host: every byte of some steps.
void expect_bytes_of_the_host(const AdamTensors& host) {
  AdamTensors device{host.grad.cuda(),
                     host.master.cuda(),
                     host.exp_avg.cuda(),
                     host.exp_avg_sq.cuda(),
                     host.param.defined() ? host.param.cuda() : at::Tensor(),
                     host.decays.cuda()};
  for (int step = 1; step <= 5; ++step) {
    const AdamScalars scalars{.lr = 1e-2,
                              .weight_decay = 0.1,
                              .decoupled_weight_decay = step % 2 == 0,
                              .step = step,
                              .grad_scale = 0.3};
    adam_update(host, scalars);
    adam_update(device, scalars);
  }
  EXPECT_TRUE(at::equal(host.master, device.master.cpu()));
  EXPECT_TRUE(at::equal(host.exp_avg, device.exp_avg.cpu()));
  EXPECT_TRUE(at::equal(host.exp_avg_sq, device.exp_avg_sq.cpu()));
  EXPECT_TRUE(!host.param.defined() || at::equal(host.param, device.param.cpu()));
}

TEST(AdamCuda, HasTheBytesOfTheHost) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  for (const auto& [param, grad] :
       {std::pair(at::kFloat, at::kFloat), std::pair(at::kBFloat16, at::kFloat),
        std::pair(at::kHalf, at::kFloat), std::pair(at::kHalf, at::kHalf),
        std::pair(at::kBFloat16, at::kBFloat16)})
    expect_bytes_of_the_host(random_adam(320'000, param, grad));
}

TEST(AdamCuda, HasTheBytesOfTheHostWithMomentsInBf16) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  auto host = random_adam(320'000, at::kBFloat16, at::kFloat);
  host.exp_avg = host.exp_avg.to(at::kBFloat16);
  expect_bytes_of_the_host(host);
  host.exp_avg_sq = host.exp_avg_sq.to(at::kBFloat16);
  expect_bytes_of_the_host(host);
}

TEST(AdamCuda, SumsSquaresInTheSameOrderEachTime) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  const auto x = at::randn({320'000});
  const auto sum = squared_sum(x).item<double>();
  EXPECT_NEAR(squared_sum(x.cuda()).item<double>(), sum, 1e-12 * sum);
  EXPECT_EQ(squared_sum(x.cuda()).item<double>(), squared_sum(x.cuda()).item<double>());
}

TEST(GradScaler, FollowsMegatronsRule) {
  DynamicGradScaler scaler(
      {.initial_loss_scale = 16, .min_loss_scale = 2, .loss_scale_window = 2, .hysteresis = 2});
  const auto after = [&](bool found_inf) {
    scaler.update(found_inf);
    return scaler.scale();
  };
  EXPECT_EQ(after(true), 16);  // once is forgiven
  EXPECT_EQ(after(true), 8);
  EXPECT_EQ(after(true), 4);  // until it has grown again
  EXPECT_EQ(after(false), 4);
  EXPECT_EQ(after(false), 8);
  EXPECT_EQ(after(true), 8);
  for (int i = 0; i < 9; ++i) scaler.update(true);
  EXPECT_EQ(scaler.scale(), 2);
  EXPECT_THROW(DynamicGradScaler({.growth_factor = 1}), Error);
}

struct Mesh {
  std::string name{};
  int ranks = 1;
  ParallelConfig parallel{};
  bool sequence_parallel = false;
};

std::vector<Mesh> dense_meshes() {
  return {{"alone", 1, {}},
          {"dp2", 2, {}},
          {"tp2", 2, {.tensor_model_parallel_size = 2}},
          {"tp2_sp_dp2", 4, {.tensor_model_parallel_size = 2}, true},
          {"pp2_dp2", 4, {.pipeline_model_parallel_size = 2}},
          {"cp2", 2, {.context_parallel_size = 2}}};
}

std::vector<Mesh> expert_meshes() {
  return {{"alone", 1, {}},
          {"ep2", 2, {.expert_model_parallel_size = 2}},
          {"tp2_sp_ep2_dp2",
           4,
           {.tensor_model_parallel_size = 2,
            .expert_model_parallel_size = 2,
            .expert_tensor_parallel_size = 1},
           true},
          {"etp2_dp2", 4, {.tensor_model_parallel_size = 2, .expert_tensor_parallel_size = 2}}};
}

struct Training {
  TinyModel model{};
  int steps = 3;
  double clip_grad = 0.5;
  distckpt::DType dtype = distckpt::DType::kF32;
  DistributedDataParallelConfig ddp{.bucket_size = 300};
};

struct Outcome {
  WholeTensors parameters{};
  std::vector<double> norms{};
};

// Four sequences, shared out over data parallel ranks, one micro-batch each.
void train_rank(const Training& training, const Mesh& on, models::World& world, Outcome& outcome) {
  auto parallel = on.parallel;
  parallel.make_vocab_size_divisible_by = 2;
  const models::ParallelState mesh(world, parallel, "mesh");
  const auto config = support::tiny_config(training.model);
  auto chunks = models::make_stage(
      config, mesh, {.dtype = training.dtype, .sequence_parallel = on.sequence_parallel});
  std::vector<GPTModel*> pointers;
  for (const auto& chunk : chunks) {
    support::fill_parameters(*chunk, 11);
    pointers.push_back(chunk.get());
  }
  DistributedDataParallel ddp(pointers, training.ddp);
  // An epsilon beside which the rounding of gradients that ought to be zero does not count.
  DistributedOptimizer optimizer(ddp, {.adam_eps = 1e-4, .clip_grad = training.clip_grad});
  const auto sequences = support::random_sequences({16, 24, 8, 12}, config.vocab_size, 3);
  for (int step = 0; step < training.steps; ++step) {
    optimizer.zero_grad();
    const auto dp = static_cast<std::size_t>(mesh.shape().dp());
    for (auto i = static_cast<std::size_t>(mesh.coordinates().dp); i < sequences.size(); i += dp) {
      const models::SequencePartition batch(models::pack({sequences[i]}), mesh);
      std::vector<at::Tensor> received;
      std::vector<at::Tensor> sent;
      const auto hidden = models::pipeline_forward(chunks, batch, {}, &received, &sent);
      if (i + dp >= sequences.size()) {
        for (std::size_t chunk = 0; chunk < chunks.size(); ++chunk) ddp.expect_last_backward(chunk);
      }
      if (hidden.defined()) sent.back() = support::token_loss(*chunks.back(), hidden, batch, 60.0);
      models::pipeline_backward(chunks, received, sent,
                                hidden.defined() ? at::ones({}) : at::Tensor());
    }
    const auto report = optimizer.step({.lr = 1e-2, .weight_decay = 0.1});
    EXPECT_TRUE(report.update_successful) << report.not_finite;
    if (world.rank() == 0) outcome.norms.push_back(report.grad_norm);
  }
  for (const auto* const chunk : pointers) {
    for (const auto& parameter : chunk->parameters().all())
      outcome.parameters.add(parameter.spec, parameter.value);
  }
}

std::unique_ptr<Outcome> train(const Training& training, const Mesh& mesh) {
  auto outcome = std::make_unique<Outcome>();
  models::run_ranks(mesh.ranks, {.timeout = std::chrono::seconds(60)},
                    [&](models::World& world) { train_rank(training, mesh, world, *outcome); });
  return outcome;
}

void expect_same_on(const Training& training, const std::vector<Mesh>& meshes) {
  const auto alone = train(training, meshes.front());
  for (const auto& mesh : meshes) {
    const auto got = train(training, mesh);
    EXPECT_EQ(
        support::first_difference(got->parameters, alone->parameters, mesh.ranks == 1 ? 0 : 1e-4),
        "")
        << mesh.name;
    for (std::size_t i = 0; i < alone->norms.size(); ++i)
      EXPECT_NEAR(got->norms[i], alone->norms[i], 1e-4 * alone->norms[i])
          << mesh.name << ", step " << i;
  }
}

// Parameters counted once in the norm, gradients summed once, however the model is spread.
TEST(DistributedOptimizer, TrainsADenseModelOnAnyMeshAsAlone) {
  expect_same_on({.model = {.family = "llama"}}, dense_meshes());
}

TEST(DistributedOptimizer, TrainsTiedEmbeddingsOnAnyMeshAsAlone) {
  expect_same_on({.model = {.family = "qwen2", .tied = true}}, dense_meshes());
}

TEST(DistributedOptimizer, TrainsExpertsOnAnyMeshAsAlone) {
  expect_same_on({.model = {.family = "qwen2_moe", .experts = 8}}, expert_meshes());
}

TEST(DistributedOptimizer, GivesTheSameBitsWithAndWithoutOverlapAndInBuckets) {
  for (const auto& mesh : {dense_meshes()[1], dense_meshes()[3]}) {
    Training training{.model = {.family = "llama"}, .dtype = distckpt::DType::kBF16};
    const auto once = train(training, mesh);
    training.ddp.overlap_grad_reduce = false;
    EXPECT_EQ(support::first_difference(train(training, mesh)->parameters, once->parameters, 0),
              "");
    training.ddp.bucket_size = 1 << 20;
    training.clip_grad = 0;  // the sum of squares is cut otherwise
    const auto whole = train(training, mesh);
    training.ddp.bucket_size = 100;
    EXPECT_EQ(support::first_difference(train(training, mesh)->parameters, whole->parameters, 0),
              "");
  }
}

// Each of at most 4 sums rounds to 8 bits; a norm is over thousands of such errors.
TEST(DistributedOptimizer, AccumulatesInTheDtypeOfTheModelIfAsked) {
  Training training{.model = {.family = "llama"}, .steps = 1, .dtype = distckpt::DType::kBF16};
  const auto wide = train(training, dense_meshes()[1]);
  training.ddp.grad_reduce_in_fp32 = false;
  const auto narrow = train(training, dense_meshes()[1]);
  EXPECT_NE(narrow->norms[0], wide->norms[0]);
  EXPECT_NEAR(narrow->norms[0], wide->norms[0], 0x1p-7 * wide->norms[0]);
}

TEST(DistributedOptimizer, SkipsAStepThatIsNotFiniteAndNamesWhere) {
  models::run_ranks(4, {.timeout = std::chrono::seconds(60)}, [](models::World& world) {
    const models::ParallelState mesh(
        world, {.pipeline_model_parallel_size = 2, .make_vocab_size_divisible_by = 2}, "mesh");
    const auto chunks =
        models::make_stage(support::tiny_config({.family = "llama", .num_layers = 4}), mesh,
                           {.dtype = distckpt::DType::kBF16});
    support::fill_parameters(*chunks[0], 1);
    DistributedDataParallel ddp({chunks[0].get()}, {.bucket_size = 300});
    DistributedOptimizer optimizer(
        ddp, {.loss_scale = GradScalerConfig{.initial_loss_scale = 8, .hysteresis = 1}});
    WholeTensors before;
    const auto collect = [&](WholeTensors& into) {
      for (const auto& parameter : chunks[0]->parameters().all())
        into.add(parameter.spec, parameter.value);
    };
    collect(before);
    // Ranks 1 and 3 are the second of two data parallel ranks on stages 0 and 1.
    for (auto& buffer : ddp.buffers()) buffer.grads().fill_(1);
    const std::string broken = world.rank() == 1 ? "decoder.layers.1.mlp.linear_fc1.weight"
                                                 : "decoder.layers.2.mlp.linear_fc2.weight";
    if (world.rank() % 2 == 1) {
      for (const auto& bucket : ddp.buffers()[0].buckets()) {
        for (const auto& slot : bucket.slots()) {
          if (ddp.spec(0, slot).key == broken)
            ddp.buffers()[0].main_grad(slot).flatten()[17] =
                std::numeric_limits<float>::quiet_NaN();
        }
      }
    }
    auto report = optimizer.step({.lr = 1, .weight_decay = 0});
    EXPECT_FALSE(report.update_successful);
    EXPECT_EQ(report.not_finite, "decoder.layers.1.mlp.linear_fc1.weight");
    EXPECT_EQ(report.skipped, 1);
    EXPECT_EQ(optimizer.num_steps(), 0);
    EXPECT_EQ(optimizer.loss_scale(), 4);
    WholeTensors after;
    collect(after);
    EXPECT_EQ(support::first_difference(after, before, 0), "");
    optimizer.zero_grad();
    report = optimizer.step({.lr = 1, .weight_decay = 0});
    EXPECT_TRUE(report.update_successful);
    EXPECT_EQ(report.skipped, 1);
    EXPECT_EQ(report.grad_norm, 0);
  });
}

// The boxes of all ranks' shards are each state exactly once, or gather_mesh_layout throws.
TEST(DistributedOptimizer, ItsShardsAreEveryTensorOnce) {
  for (const auto& mesh_of : {dense_meshes()[3], dense_meshes()[4], expert_meshes()[2]}) {
    const bool moe = mesh_of.parallel.expert_model_parallel_size > 1;
    models::run_ranks(
        mesh_of.ranks, {.timeout = std::chrono::seconds(60)}, [&](models::World& world) {
          auto parallel = mesh_of.parallel;
          parallel.make_vocab_size_divisible_by = 2;
          const models::ParallelState mesh(world, parallel, "mesh");
          const auto chunks = models::make_stage(
              support::tiny_config(
                  {.family = moe ? "qwen2_moe" : "qwen2", .tied = !moe, .experts = 8}),
              mesh, {.sequence_parallel = mesh_of.sequence_parallel});
          support::fill_parameters(*chunks[0], 1);
          DistributedDataParallel ddp({chunks[0].get()}, {.bucket_size = 300});
          const DistributedOptimizer optimizer(ddp, {});
          std::vector<distckpt::ShardedTensor> mine;
          const auto shards = optimizer.sharded_state_dict();
          for (const auto& shard : shards) {
            EXPECT_NO_THROW(shard.tensor.validate()) << shard.tensor.key;
            if (!shard.tensor.key.starts_with("optimizer.state.param.")) continue;
            // A master is its parameter in fp32.
            const auto key = shard.tensor.key.substr(std::string("optimizer.state.param.").size());
            for (const auto& weight : chunks[0]->sharded_state_dict()) {
              if (weight.tensor.key != key) continue;
              const auto common = distckpt::intersect(weight.tensor.box(), shard.tensor.box());
              if (!common) continue;
              const auto at = [&](const distckpt::LocalShard& of) {
                std::int64_t index = 0;
                for (int dim = 0; dim < common->rank(); ++dim)
                  index += (common->offset[dim] - of.tensor.global_offset[dim]) * of.strides[dim];
                return index;
              };
              EXPECT_EQ(reinterpret_cast<const float*>(shard.data)[at(shard)],
                        static_cast<float>(
                            reinterpret_cast<const at::BFloat16*>(weight.data)[at(weight)]))
                  << key;
            }
          }
          const auto gather = [&](std::string_view mine_as_bytes) {
            return mesh.all().all_gather_bytes(mine_as_bytes);
          };
          const distckpt::RankGroup group{
              .rank = world.rank(), .size = world.size(), .all_gather_bytes = gather};
          EXPECT_NO_THROW(distckpt::gather_mesh_layout(group, shards));
        });
  }
}

}  // namespace distributed_optimizer_test
}  // namespace ferry::trainer
