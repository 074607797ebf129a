#include "trainer/engine/training_checkpoint.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "converter/verify.h"
#include "distckpt/base/error.h"
#include "models/distributed/world.h"
#include "models/pipeline_forward.h"
#include "tests/support/models/tiny_training.h"
#include "tests/support/temp_dir.h"
#include "trainer/engine/micro_batches.h"
#include "trainer/engine/pipeline/pipeline_schedule.h"

namespace ferry::trainer {
namespace training_checkpoint_test {

namespace fs = std::filesystem;
using models::GPTModel;
using models::ParallelConfig;
using support::WholeTensors;

struct Mesh {
  std::string name{};
  int ranks = 1;
  ParallelConfig parallel{};
};

const Mesh kAlone{"alone", 1, {}};
const Mesh kDp2{"dp2", 2, {}};
const Mesh kTp2Dp2{"tp2_dp2", 4, {.tensor_model_parallel_size = 2}};
const Mesh kPp2{
    "pp2_vpp2", 2, {.pipeline_model_parallel_size = 2, .virtual_pipeline_model_parallel_size = 2}};
const Mesh kEp2{"ep2_dp2", 4, {.expert_model_parallel_size = 2}};

// A run on one rank of a mesh.
class Trainer {
 public:
  Trainer(const support::TinyModel& tiny,
          const Mesh& on,
          const fs::path& root,
          models::World& world,
          CheckpointConfig config = {},
          const std::string& name = "mesh",
          OptimizerConfig optimizer = {})
      : mesh_(world, with_vocab(on.parallel), name), config_(support::tiny_config(tiny)) {
    chunks_ = models::make_stage(config_, mesh_, {.dtype = distckpt::DType::kBF16});
    for (const auto& chunk : chunks_) {
      support::fill_parameters(*chunk, 4);
      pointers_.push_back(chunk.get());
    }
    ddp_ = std::make_unique<DistributedDataParallel>(
        pointers_, DistributedDataParallelConfig{.bucket_size = 700});
    optimizer.loss_scale = GradScalerConfig{.initial_loss_scale = 4, .loss_scale_window = 2};
    optimizer_ = std::make_unique<DistributedOptimizer>(*ddp_, optimizer);
    p2p_ = std::make_unique<P2PCommunicator>(world, mesh_, name + "/p2p", chunks_.size() > 1);
    config.root = root;
    config.threads = 1;
    checkpoint_ =
        std::make_unique<TrainingCheckpoint>(world, pointers_, *optimizer_, scheduler_, config);
  }

  TrainingCheckpoint& checkpoint() { return *checkpoint_; }
  const DistributedOptimizer& optimizer() const { return *optimizer_; }
  const OptimizerParamScheduler& scheduler() const { return scheduler_; }

  void train(std::int64_t first, std::int64_t last) {
    for (auto step = first; step <= last; ++step) {
      const auto all = support::random_sequences({8, 16, 4, 12, 8, 8, 20, 4}, config_.vocab_size,
                                                 static_cast<std::uint64_t>(step));
      std::vector<at::Tensor> mine;
      for (auto i = static_cast<std::size_t>(mesh_.coordinates().dp); i < all.size();
           i += static_cast<std::size_t>(mesh_.shape().dp()))
        mine.push_back(all[i]);
      const auto batches = pack_micro_batches(mine, split_micro_batches(mine.size(), 2), mesh_);
      optimizer_->zero_grad();
      (void)forward_backward(
          {pointers_, p2p_.get(), ddp_.get()}, batches,
          [&](const GPTModel& model, const at::Tensor& hidden, std::size_t i) {
            return LossOutput{.loss = support::token_loss(model, hidden, batches[i], 80)};
          },
          {.grad_scale = optimizer_->loss_scale()});
      EXPECT_TRUE(optimizer_->step(scheduler_.now()).update_successful);
      scheduler_.step(1);
    }
  }

  void collect(WholeTensors& weights, WholeTensors& state) const {
    for (const auto* const chunk : pointers_) {
      for (const auto& parameter : chunk->parameters().all())
        weights.add(parameter.spec, parameter.value);
    }
    for (const auto& shard : optimizer_->sharded_state_dict()) state.add(shard);
  }

 private:
  static ParallelConfig with_vocab(ParallelConfig parallel) {
    parallel.make_vocab_size_divisible_by = 4;
    return parallel;
  }

  models::ParallelState mesh_;
  models::TransformerConfig config_;
  std::vector<std::unique_ptr<GPTModel>> chunks_;
  std::vector<GPTModel*> pointers_;
  std::unique_ptr<DistributedDataParallel> ddp_;
  std::unique_ptr<DistributedOptimizer> optimizer_;
  std::unique_ptr<P2PCommunicator> p2p_;
  OptimizerParamScheduler scheduler_{{.max_lr = 1e-2,
                                      .min_lr = 1e-3,
                                      .lr_warmup_steps = 2,
                                      .lr_decay_steps = 10,
                                      .lr_decay_style = LrDecayStyle::kCosine}};
  std::unique_ptr<TrainingCheckpoint> checkpoint_;
};

struct Tensors {
  WholeTensors weights{}, state{};
};

void on_ranks(const Mesh& mesh, const std::function<void(models::World&)>& body) {
  models::run_ranks(mesh.ranks, {.timeout = std::chrono::seconds(60)}, body);
}

void expect_resumes(const support::TinyModel& tiny,
                    const Mesh& mesh,
                    const std::vector<Mesh>& others,
                    const OptimizerConfig& optimizer = {}) {
  const support::TempDir dir;
  Tensors saved;
  Tensors straight;
  on_ranks(mesh, [&](models::World& world) {
    Trainer run(tiny, mesh, dir.path(), world, {}, "mesh", optimizer);
    run.train(1, 2);
    run.collect(saved.weights, saved.state);
    run.checkpoint().save(
        2, {.shared = {{"cursor", "document 7"}}, .of_rank = fmt::format("rng {}", world.rank())});
    run.train(3, 4);
    run.collect(straight.weights, straight.state);
  });
  // Whatever was in memory before is gone: another seed would show as well as NaN.
  Tensors resumed;
  on_ranks(mesh, [&](models::World& world) {
    Trainer run(tiny, mesh, dir.path(), world, {}, "mesh", optimizer);
    run.train(9, 9);
    const auto from = run.checkpoint().load();
    EXPECT_EQ(from.iteration, 2);
    EXPECT_EQ(from.caller.shared.at("cursor"), "document 7");
    EXPECT_EQ(from.caller.of_rank, fmt::format("rng {}", world.rank()));
    EXPECT_EQ(run.optimizer().num_steps(), 2);
    EXPECT_EQ(run.optimizer().loss_scale(), 8);
    EXPECT_EQ(run.scheduler().num_steps(), 2);
    run.train(3, 4);
    run.collect(resumed.weights, resumed.state);
  });
  EXPECT_EQ(support::first_difference(resumed.weights, straight.weights, 0), "") << mesh.name;
  EXPECT_EQ(support::first_difference(resumed.state, straight.state, 0), "") << mesh.name;
  for (const auto& other : others) {
    Tensors there;
    on_ranks(other, [&](models::World& world) {
      Trainer run(tiny, other, dir.path(), world, {}, "mesh", optimizer);
      const auto from = run.checkpoint().load(2);
      EXPECT_EQ(from.same_ranks, other.ranks == mesh.ranks);
      run.collect(there.weights, there.state);
    });
    EXPECT_EQ(support::first_difference(there.weights, saved.weights, 0), "") << other.name;
    EXPECT_EQ(support::first_difference(there.state, saved.state, 0), "") << other.name;
  }
}

TEST(TrainingCheckpoint, GoesOnBitForBitAndOnOtherMeshesWithEveryTensor) {
  expect_resumes({.family = "qwen2", .num_layers = 4, .tied = true}, kTp2Dp2, {kAlone, kDp2, kPp2});
  expect_resumes({.family = "llama", .num_layers = 4}, kPp2, {kAlone, kTp2Dp2});
}

TEST(TrainingCheckpoint, CarriesExperts) {
  expect_resumes({.family = "qwen2_moe", .experts = 8}, kEp2, {kAlone, kTp2Dp2});
}

TEST(TrainingCheckpoint, CarriesMomentsInBf16OfAnOptimizerOnTheHost) {
  expect_resumes({.family = "qwen2", .num_layers = 4}, kTp2Dp2, {kAlone, kPp2},
                 {.exp_avg_dtype = distckpt::DType::kBF16,
                  .exp_avg_sq_dtype = distckpt::DType::kBF16,
                  .offload = true});
}

TEST(TrainingCheckpoint, IsACheckpointOfTheModel) {
  const support::TempDir dir;
  on_ranks(kTp2Dp2, [&](models::World& world) {
    Trainer run({.family = "llama"}, kTp2Dp2, dir / "four", world);
    run.checkpoint().save(1, {});
  });
  on_ranks(kAlone, [&](models::World& world) {
    Trainer run({.family = "llama"}, kAlone, dir / "one", world);
    run.checkpoint().save(1, {});
  });
  const auto report = converter::verify({.left = dir / "four", .right = dir / "one"});
  EXPECT_TRUE(report.tensors.empty()) << report.tensors.size();
  EXPECT_TRUE(report.unpaired.empty());
  EXPECT_GT(report.num_compared, 10);
}

std::string bytes_of(const fs::path& root) {
  std::string all;
  for (const auto& [name, content] : support::read_tree(root)) all += name + "\n" + content;
  return all;
}

// A run that was stopped after it had saved does the step again, and saves it again.
TEST(TrainingCheckpoint, TakesThePlaceOfTheSameIteration) {
  const support::TempDir dir;
  on_ranks(kPp2, [&](models::World& world) {
    Trainer run({.family = "llama", .num_layers = 4}, kPp2, dir / "twice", world);
    Trainer other({.family = "llama", .num_layers = 4}, kPp2, dir / "once", world,
                  {.name = "other"}, "other");
    run.train(1, 1);
    run.checkpoint().save(1, {});
    run.train(2, 2);
    run.checkpoint().save(1, {});
    other.train(1, 2);
    other.checkpoint().save(1, {});
  });
  EXPECT_EQ(bytes_of(dir / "twice"), bytes_of(dir / "once"));
}

TEST(TrainingCheckpoint, HasTheSameBytesWhereverTheOptimizerLives) {
  const support::TempDir dir;
  on_ranks(kTp2Dp2, [&](models::World& world) {
    Trainer run({.family = "llama"}, kTp2Dp2, dir / "host", world, {}, "mesh", {.offload = true});
    Trainer other({.family = "llama"}, kTp2Dp2, dir / "device", world, {.name = "other"}, "other");
    for (auto* const one : {&run, &other}) one->train(1, 2);
    run.checkpoint().save_in_background(2, {});
    run.checkpoint().finish_save();
    other.checkpoint().save(2, {});
  });
  EXPECT_EQ(bytes_of(dir / "host"), bytes_of(dir / "device"));
}

// A step later nothing in memory is what it was; what is on disk is.
TEST(TrainingCheckpoint, IsWrittenInTheBackgroundAsItWas) {
  for (const auto& mesh : {kTp2Dp2, kPp2}) {
    const support::TempDir dir;
    on_ranks(mesh, [&](models::World& world) {
      Trainer run({.family = "llama", .num_layers = 4}, mesh, dir / "background", world);
      Trainer other({.family = "llama", .num_layers = 4}, mesh, dir / "at_once", world,
                    {.name = "other"}, "other");
      EXPECT_FALSE(run.checkpoint().finish_save().has_value());
      for (auto* const one : {&run, &other}) one->train(1, 1);
      const CallerState caller{.shared = {{"cursor", "7"}}, .of_rank = "of a rank"};
      run.checkpoint().save_in_background(1, caller);
      run.train(2, 2);
      EXPECT_GT(run.checkpoint().finish_save()->bytes, 0);
      EXPECT_FALSE(run.checkpoint().finish_save().has_value());
      other.checkpoint().save(1, caller);
    });
    EXPECT_EQ(bytes_of(dir / "background"), bytes_of(dir / "at_once"));
    EXPECT_GT(bytes_of(dir / "background").size(), 10000U);
  }
}

TEST(TrainingCheckpoint, KeepsTheLatestAndEverySoMany) {
  EXPECT_EQ(superseded({10, 20, 30, 40, 50}, 2, 20), (std::vector<std::int64_t>{10, 30}));
  EXPECT_EQ(superseded({30, 10, 20}, 1, 0), (std::vector<std::int64_t>{10, 20}));
  EXPECT_EQ(superseded({10, 20}, 0, 0), (std::vector<std::int64_t>{}));
  const support::TempDir dir;
  on_ranks(kAlone, [&](models::World& world) {
    Trainer run({.family = "llama"}, kAlone, dir.path(), world, {.keep_last = 2, .keep_every = 3});
    for (std::int64_t iteration = 2; iteration <= 6; ++iteration)
      run.checkpoint().save(iteration, {});
  });
  const auto there = [&](int i) { return fs::exists(dir / fmt::format("iter_{:07}", i)); };
  EXPECT_FALSE(there(2));
  EXPECT_TRUE(there(3));
  EXPECT_FALSE(there(4));
  EXPECT_TRUE(there(5));
  EXPECT_TRUE(there(6));
}

TEST(TrainingCheckpoint, RefusesAModelWithoutARun) {
  const support::TempDir dir;
  support::write_tiny_model({.family = "llama"}, dir.path(), 1);
  on_ranks(kAlone, [&](models::World& world) {
    Trainer run({.family = "llama"}, kAlone, dir.path(), world);
    try {
      run.checkpoint().load();
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kLayout) << error.what();
    }
  });
}

}  // namespace training_checkpoint_test
}  // namespace ferry::trainer
