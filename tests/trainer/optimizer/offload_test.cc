#include "trainer/optimizer/offload.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>

#include "distckpt/base/error.h"
#include "models/device/device.h"
#include "models/distributed/world.h"
#include "models/pipeline_forward.h"
#include "tests/support/models/tiny_training.h"
#include "trainer/engine/micro_batches.h"
#include "trainer/engine/pipeline/pipeline_schedule.h"
#include "trainer/optimizer/distributed_optimizer.h"

namespace ferry::trainer {
namespace offload_test {

using support::WholeTensors;

// A step's gradients of a model, and a step.
class Trainer {
 public:
  Trainer(models::World& world,
          distckpt::DType dtype,
          const support::TinyModel& tiny,
          const OptimizerConfig& config = {})
      : mesh_(world, {.make_vocab_size_divisible_by = 2}, "mesh"),
        config_(support::tiny_config(tiny)) {
    chunks_ = models::make_stage(config_, mesh_, {.dtype = dtype});
    support::fill_parameters(*chunks_[0], 4);
    ddp = std::make_unique<DistributedDataParallel>(
        chunks(), DistributedDataParallelConfig{.bucket_size = 700});
    optimizer = std::make_unique<DistributedOptimizer>(*ddp, config);
  }

  std::vector<models::GPTModel*> chunks() const { return {chunks_[0].get()}; }
  std::int64_t num_parameters() const {
    std::int64_t count = 0;
    for (const auto& parameter : chunks_[0]->parameters().all()) count += parameter.value.numel();
    return count;
  }
  void backward(std::uint64_t seed) {
    const auto sequences = support::random_sequences({8, 16}, config_.vocab_size, seed);
    const auto batches = pack_micro_batches(sequences, {{0}, {1}}, mesh_);
    optimizer->zero_grad();
    (void)forward_backward(
        {.chunks = chunks(), .ddp = ddp.get()}, batches,
        [&](const models::GPTModel& model, const at::Tensor& hidden, std::size_t i) {
          return LossOutput{.loss = support::token_loss(model, hidden, batches[i], 24)};
        });
  }
  void step() { EXPECT_TRUE(optimizer->step({.lr = 1e-2, .weight_decay = 0.1}).update_successful); }
  void collect(WholeTensors& into) const {
    for (const auto& parameter : chunks_[0]->parameters().all())
      into.add(parameter.spec, parameter.value.cpu());
  }

 private:
  models::ParallelState mesh_;
  models::TransformerConfig config_;
  std::vector<std::unique_ptr<models::GPTModel>> chunks_;

 public:
  std::unique_ptr<DistributedDataParallel> ddp;  // looks at the chunks until it ends
  std::unique_ptr<DistributedOptimizer> optimizer;
};

void expect_rests_and_goes_on(const models::World::Options& options,
                              distckpt::DType dtype,
                              const support::TinyModel& tiny) {
  models::World world(options);
  WholeTensors straight;
  {
    Trainer run(world, dtype, tiny);
    for (const std::uint64_t seed : {1, 2}) {
      run.backward(seed);
      run.step();
    }
    run.collect(straight);
  }
  Trainer run(world, dtype, tiny, {.offload = true});
  Offload offload(run.chunks(), run.ddp.get());
  const auto count = run.num_parameters();
  const auto element = size_of(dtype);
  const auto near = [&](std::int64_t bytes, std::int64_t of_each) {  // padding of buckets aside
    return bytes >= count * of_each && bytes < count * of_each + count * of_each / 4;
  };
  EXPECT_TRUE(near(offload.params().device_bytes(), element));
  EXPECT_TRUE(near(offload.grads().device_bytes(), 4));
  EXPECT_EQ(run.optimizer->device_bytes(), 0);
  for (const auto& tensor : run.optimizer->own_state()) EXPECT_TRUE(tensor.is_cpu());
  const auto whole = offload.params().device_bytes();
  run.backward(1);
  run.step();
  offload.to_host({.param = true, .grad = true});
  offload.to_host({.param = true});  // again: nothing
  EXPECT_EQ(offload.params().device_bytes() + offload.grads().device_bytes(), 0);
  EXPECT_EQ(offload.params().host_bytes(), whole);
  EXPECT_EQ(offload.grads().host_bytes(), 0);  // gradients of a step that is over
  EXPECT_THROW(run.backward(2), Error);
  offload.to_device({.param = true, .grad = true});
  EXPECT_EQ(offload.params().host_bytes(), 0);
  run.backward(2);
  run.step();
  WholeTensors rested;
  run.collect(rested);
  EXPECT_EQ(support::first_difference(rested, straight, 0), "");
}

TEST(Offload, FreesEachPartByItselfAndTrainingGoesOnBitForBit) {
  for (const auto dtype : {distckpt::DType::kBF16, distckpt::DType::kF32})
    expect_rests_and_goes_on({}, dtype, {.family = "qwen2_moe", .experts = 8});
}

TEST(Offload, WorksForAModelThatIsNotTrained) {
  models::World world({});
  const models::ParallelState mesh(world, {}, "mesh");
  const auto chunks = models::make_stage(support::tiny_config({.family = "llama"}), mesh, {});
  support::fill_parameters(*chunks[0], 4);
  WholeTensors before;
  WholeTensors after;
  const auto& all = chunks[0]->parameters().all();
  for (const auto& parameter : all) before.add(parameter.spec, parameter.value.clone());
  Offload offload({chunks[0].get()});
  EXPECT_GT(offload.params().device_bytes(), 0);
  EXPECT_EQ(offload.grads().device_bytes(), 0);
  offload.to_host({.param = true, .grad = true});
  EXPECT_EQ(offload.params().device_bytes(), 0);
  offload.to_device({.param = true, .grad = true});
  for (const auto& parameter : all) after.add(parameter.spec, parameter.value);
  EXPECT_EQ(support::first_difference(after, before, 0), "");
}

TEST(OffloadCuda, FreesTheDevicesMemory) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  const at::Device device(at::kCUDA, 0);
  models::set_device(device);
  // The kernels of a GPU want heads of 8 channels, and grouped products rows of 16 bytes.
  expect_rests_and_goes_on(
      {.device = device}, distckpt::DType::kBF16,
      {.family = "qwen2_moe", .head_dim = 8, .hidden = 32, .ffn = 48, .experts = 8});
  const auto tensor = at::randn({1 << 26}, at::TensorOptions().device(device));
  const auto before = tensor.cpu();
  OffloadableMemory memory({tensor, tensor.narrow(0, 5, 10)}, /*keep=*/true);
  models::release_cached_memory(device);
  const auto free = *models::free_memory(device);
  memory.to_host();
  models::release_cached_memory(device);
  EXPECT_GE(*models::free_memory(device) - free, std::int64_t{1} << 28);
  memory.to_device();
  EXPECT_TRUE(at::equal(tensor.cpu(), before));
}

}  // namespace offload_test
}  // namespace ferry::trainer
