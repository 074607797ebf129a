#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>
#include <string>

#include "models/device/device.h"
#include "models/distributed/world.h"
#include "models/pipeline_forward.h"
#include "tests/support/memory_meter.h"
#include "tests/support/models/tiny_training.h"
#include "trainer/engine/micro_batches.h"
#include "trainer/engine/pipeline/pipeline_schedule.h"
#include "trainer/optimizer/distributed_data_parallel.h"
#include "trainer/optimizer/distributed_optimizer.h"
#include "trainer/plan/memory_needs.h"

namespace ferry::trainer {
namespace measured_memory_test {

class Model {
 public:
  Model(const support::TinyModel& tiny, models::ModelOptions options, at::Device device = at::kCPU)
      : world_({.device = device}),
        mesh_(world_, {.make_vocab_size_divisible_by = 8}, "mesh"),
        config_(support::tiny_config(tiny)) {
    chunks_ = models::make_stage(config_, mesh_, options);
    support::fill_parameters(*chunks_[0], 1);
  }

  models::GPTModel& chunk() const { return *chunks_[0]; }
  const models::ParallelState& mesh() const { return mesh_; }
  const models::TransformerConfig& config() const { return config_; }
  ModelOnRank on_rank() const {
    const auto& options = chunk().options();
    EngineConfig engine{.sequence_parallel = options.sequence_parallel,
                        .alignment = options.alignment,
                        .dtype = options.dtype};
    return {config_, engine, mesh_.shape(), mesh_.coordinates(), {}, world_.device().is_cpu()};
  }
  models::SequencePartition batch(const std::vector<std::int64_t>& lengths) const {
    return {models::pack(support::random_sequences(lengths, config_.vocab_size, 2)), mesh_};
  }

 private:
  models::World world_;
  models::ParallelState mesh_;
  models::TransformerConfig config_;
  std::vector<std::unique_ptr<models::GPTModel>> chunks_;
};

support::TinyModel dense() {
  return {.num_layers = 3, .head_dim = 16, .hidden = 64, .ffn = 160, .vocab = 96};
}
support::TinyModel experts() {
  auto tiny = dense();
  tiny.family = "qwen3_moe";
  tiny.experts = 16;  // more than the 8 of a token
  tiny.moe_ffn = 96;
  return tiny;
}
support::TinyModel latent() {
  auto tiny = dense();
  tiny.family = "deepseek_v3";
  tiny.kv_lora = 24;
  tiny.q_lora = 24;
  tiny.v_dim = 16;
  tiny.experts = 16;  // more than the 8 of a token
  tiny.moe_ffn = 96;
  return tiny;
}

using models::Recompute;
constexpr Recompute kFull{.granularity = Recompute::Granularity::kFull};
constexpr Recompute kBlock{.granularity = Recompute::Granularity::kFull,
                           .method = Recompute::Method::kBlock,
                           .num_layers = 2};
constexpr Recompute kSelective{.granularity = Recompute::Granularity::kSelective,
                               .modules = {.core_attn = true, .mlp = true, .moe = true}};

constexpr Recompute kMoeAct{.granularity = Recompute::Granularity::kSelective,
                            .modules = {.moe_act = true}};

struct Case {
  std::string name{};
  support::TinyModel tiny{};
  distckpt::DType dtype = distckpt::DType::kBF16;
  Recompute recompute{};
};

class Activations : public testing::TestWithParam<Case> {};

// Within a sixth: kernels of the host keep a few more small things.
TEST_P(Activations, AreWhatAutogradKeeps) {
  const auto& [name, tiny, dtype, recompute] = GetParam();
  const Model model(tiny, {.dtype = dtype, .recompute = recompute});
  for (const auto& leaf : model.chunk().parameters().leaves())
    leaf.value.set_requires_grad(leaf.value.is_floating_point());
  const auto batch = model.batch({40, 24, 64});
  const auto meter = std::make_shared<support::MemoryMeter>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
  const auto hidden = model.chunk().forward(batch);
  const auto on_rank = model.on_rank();
  const double keys = (40.0 * 40 + 24 * 24 + 64 * 64) / 128;
  const auto expected =
      128 * models::activation_bytes(on_rank.chunks().front(), recompute, keys).kept;
  EXPECT_NEAR(static_cast<double>(meter->now), expected, expected / 6);
}

INSTANTIATE_TEST_SUITE_P(
    Of,
    Activations,
    testing::Values(Case{"dense", dense()},
                    Case{"dense_fp32", dense(), distckpt::DType::kF32},
                    Case{"dense_full", dense(), distckpt::DType::kBF16, kFull},
                    Case{"dense_block", dense(), distckpt::DType::kBF16, kBlock},
                    Case{"dense_selective", dense(), distckpt::DType::kBF16, kSelective},
                    Case{"experts", experts()},
                    Case{"experts_selective", experts(), distckpt::DType::kBF16, kSelective},
                    Case{"experts_moe_act", experts(), distckpt::DType::kBF16, kMoeAct},
                    Case{"latent", latent()}),
    [](const auto& test) { return test.param.name; });

class ActivationsOfTwoRanks
    : public testing::TestWithParam<std::tuple<models::Alignment, bool /*sequence parallel*/>> {};

// Ranks that gather the inputs of their products by rows keep these whole. What they send may be
// freed by another thread, which the meter does not see: the least of a few passes counts.
TEST_P(ActivationsOfTwoRanks, AreWhatAutogradKeeps) {
  const auto& [alignment, sequence_parallel] = GetParam();
  const models::ModelOptions options{.alignment = alignment,
                                     .dtype = distckpt::DType::kBF16,
                                     .sequence_parallel = sequence_parallel};
  auto wide = dense();  // the host pads products of few columns
  wide.hidden = 256;
  wide.head_dim = 64;
  wide.ffn = 640;
  models::run_ranks(2, {}, [&](models::World& world) {
    const models::ParallelState mesh(
        world, {.tensor_model_parallel_size = 2, .make_vocab_size_divisible_by = 8}, "mesh");
    const auto config = support::tiny_config(wide);
    const auto chunks = models::make_stage(config, mesh, options);
    for (const auto& leaf : chunks[0]->parameters().leaves())
      leaf.value.set_requires_grad(leaf.value.is_floating_point());
    const models::SequencePartition batch(
        models::pack(support::random_sequences({40, 24, 64}, config.vocab_size, 2)), mesh);
    auto kept = std::numeric_limits<double>::max();
    for (int pass = 0; pass < 5; ++pass) {
      const auto meter = std::make_shared<support::MemoryMeter>();
      const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
      const auto hidden = chunks[0]->forward(batch);
      kept = std::min(kept, static_cast<double>(meter->now));
    }
    const EngineConfig engine{.parallel = mesh.shape().parallel(),
                              .sequence_parallel = options.sequence_parallel,
                              .alignment = options.alignment,
                              .dtype = options.dtype};
    const ModelOnRank on_rank(config, engine, mesh.shape(), mesh.coordinates(), {}, true);
    const double keys = (40.0 * 40 + 24 * 24 + 64 * 64) / 128;
    const auto expected =
        128 * models::activation_bytes(on_rank.chunks().front(), Recompute{}, keys).kept;
    EXPECT_NEAR(kept, expected, expected / 6);
  });
}

INSTANTIATE_TEST_SUITE_P(Of,
                         ActivationsOfTwoRanks,
                         testing::Combine(testing::Values(models::Alignment::kFast,
                                                          models::Alignment::kBitwise),
                                          testing::Bool()));

std::int64_t peak_of_a_batch(const Model& model,
                             const std::vector<models::SequencePartition>& batches) {
  const auto meter = std::make_shared<support::MemoryMeter>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
  const auto device = model.mesh().world().device();
  models::reset_peak_memory(device);
  const auto before = models::peak_memory(device);
  (void)forward_backward(
      {.chunks = {&model.chunk()}}, batches,
      [&](const models::GPTModel& of, const at::Tensor& hidden, std::size_t i) {
        const auto& tokens = batches[i].tokens();
        const auto weights =
            at::ones(tokens.sizes(), at::TensorOptions().dtype(at::kFloat).device(device));
        return LossOutput{.loss = of.cross_entropy(hidden, tokens, weights).loss};
      });
  return device.is_cuda() ? models::peak_memory(device) - before : meter->most;
}

void expect_peak(at::Device device,
                 const support::TinyModel& tiny,
                 const Recompute& recompute,
                 std::int64_t length,
                 distckpt::DType dtype = distckpt::DType::kBF16) {
  const Model model(tiny, {.dtype = dtype, .recompute = recompute}, device);
  for (const auto& leaf : model.chunk().parameters().leaves())
    leaf.value.set_requires_grad(leaf.value.is_floating_point());
  const std::vector batches{model.batch({length, length}), model.batch({length, length})};
  (void)peak_of_a_batch(model, batches);  // gradients have their memory from now on
  const auto measured = static_cast<double>(peak_of_a_batch(model, batches));
  const MicroBatchShape shape{.tokens = 2 * length, .keys = static_cast<double>(length)};
  const auto formula =
      static_cast<double>(batch_bytes(model.on_rank(), recompute, shape, batches.size()).total());
  EXPECT_GT(formula, 0.8 * measured);
  EXPECT_LT(formula, 1.4 * measured);
  testing::Test::RecordProperty("formula_of_measured", std::to_string(formula / measured));
  const auto fits = tokens_that_fit(model.on_rank(), recompute, shape, batches.size(),
                                    static_cast<std::int64_t>(formula));
  EXPECT_EQ(fits, shape.tokens);
}

struct PeakCase {
  std::string name{};
  support::TinyModel tiny{};
  Recompute recompute{};
  distckpt::DType dtype = distckpt::DType::kBF16;
};

class BatchBytes : public testing::TestWithParam<PeakCase> {};

// Each further thread has scratch of oneDNN's, which the formula leaves out.
class OneThread {
 public:
  OneThread() { at::set_num_threads(1); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;
  ~OneThread() { at::set_num_threads(before_); }

 private:
  int before_ = at::get_num_threads();
};

TEST_P(BatchBytes, AreThePeakOfABatchOnTheHost) {
  const auto& [name, tiny, recompute, dtype] = GetParam();
  const OneThread one_thread;
  expect_peak(at::kCPU, tiny, recompute, 64, dtype);
}

support::TinyModel many_words() {
  auto tiny = dense();
  tiny.vocab = 4096;
  return tiny;
}

INSTANTIATE_TEST_SUITE_P(
    Of,
    BatchBytes,
    testing::Values(PeakCase{"dense", dense()},
                    PeakCase{"dense_full", dense(), kFull},
                    PeakCase{"experts", experts()},
                    PeakCase{"many_words", many_words()},
                    PeakCase{"many_words_fp32", many_words(), {}, distckpt::DType::kF32}),
    [](const auto& test) { return test.param.name; });

TEST(BatchBytesCuda, AreThePeakOfABatch) {
  if (!at::hasCUDA()) GTEST_SKIP() << "needs a GPU";
  const support::TinyModel large{.num_layers = 8,
                                 .num_query_groups = 4,
                                 .heads_per_group = 4,
                                 .head_dim = 64,
                                 .hidden = 1024,
                                 .ffn = 4096,
                                 .vocab = 32000};
  for (const auto& recompute : {Recompute{}, kFull, kBlock})
    expect_peak(at::Device(at::kCUDA, 0), large, recompute, 2048);
}

TEST(ModelMemory, CountsWhatARankHolds) {
  const Model model(dense(), {});
  std::int64_t elements = 0;
  for (const auto& parameter : model.chunk().parameters().all())
    elements += parameter.value.numel();
  const auto memory = model.on_rank().memory(true);
  EXPECT_EQ(memory.parameters, 2 * elements);
  EXPECT_EQ(memory.gradients, 4 * elements);
  EXPECT_EQ(memory.optimizer, 12 * elements);
  const Model wide(dense(), {.dtype = distckpt::DType::kF32});
  EXPECT_EQ(wide.on_rank().memory(true).optimizer, 8 * elements);
}

// A step of training on the host, from its weights on: what is planned is within a tenth of what is
// allocated, which has padding and the kernels' scratch besides.
TEST(ModelMemory, OfAStepIsWithinATenthOfWhatIsMeasured) {
  auto large = dense();
  large.hidden = 256;
  large.head_dim = 64;
  large.ffn = 1024;
  large.vocab = 2048;
  const auto meter = std::make_shared<support::MemoryMeter>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
  const Model model(large, {.dtype = distckpt::DType::kF32});
  DistributedDataParallel ddp({&model.chunk()}, {});
  DistributedOptimizer optimizer(ddp, {});
  const auto on_rank = model.on_rank();
  const auto held = static_cast<double>(on_rank.memory(true).total());
  EXPECT_NEAR(static_cast<double>(meter->now), held, 0.02 * held);

  const std::vector batches{model.batch({512, 512}), model.batch({512, 512})};
  (void)forward_backward(
      {.chunks = {&model.chunk()}, .ddp = &ddp}, batches,
      [&](const models::GPTModel& of, const at::Tensor& hidden, std::size_t i) {
        const auto& tokens = batches[i].tokens();
        return LossOutput{.loss = of.cross_entropy(hidden, tokens, at::ones(tokens.sizes())).loss};
      });
  (void)optimizer.step({});
  const auto planned = held + static_cast<double>(batch_bytes(on_rank, {}, {1024, 512}, 2).total());
  EXPECT_NEAR(static_cast<double>(meter->most), planned, 0.1 * planned);
}

TEST(ModelMemory, OfOneThatDoesNotLearnIsItsParameters) {
  const Model model(dense(), {});
  const auto memory = model.on_rank().memory(false);
  EXPECT_EQ(memory.gradients + memory.optimizer, 0);
}

TEST(LargestLeaf, IsThatOfTheParameters) {
  for (const auto& tiny : {dense(), experts()}) {
    const Model model(tiny, {});
    std::int64_t largest = 0;
    for (const auto& leaf : model.chunk().parameters().leaves())
      largest = std::max(largest, static_cast<std::int64_t>(leaf.value.nbytes()));
    EXPECT_EQ(model.on_rank().largest_leaf(0), largest);
  }
}

}  // namespace measured_memory_test
}  // namespace ferry::trainer
