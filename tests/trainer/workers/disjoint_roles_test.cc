// Actor, critic and rollout on ranks of their own in one world: each does there what it does alone.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "converter/alignment/model_files.h"
#include "converter/verify.h"
#include "rollout/llm_engine.h"
#include "tests/support/expect.h"
#include "tests/support/models/rollout_rows.h"
#include "tests/support/models/trainee.h"
#include "tests/support/temp_dir.h"
#include "trainer/engine/micro_batches.h"
#include "trainer/engine/training_checkpoint.h"
#include "trainer/update/update_actor.h"
#include "trainer/update/update_critic.h"
#include "trainer/workers/hybrid_engine.h"

namespace ferry::trainer {
namespace disjoint_roles_test {

namespace fs = std::filesystem;
using support::Trainee;
using support::WholeTensors;

constexpr models::ModelOptions kBitwise{.alignment = models::Alignment::kBitwise,
                                        .dtype = distckpt::DType::kF32};

models::ParallelConfig tp(int size) {
  return {.tensor_model_parallel_size = size, .make_vocab_size_divisible_by = 2};
}

template <typename Chunks>
void collect(const Chunks& chunks, WholeTensors& into) {
  for (const auto& chunk : chunks) {
    for (const auto& parameter : chunk->parameters().all())
      into.add(parameter.spec, parameter.value);
  }
}

RolloutBatch actor_rows() {
  auto batch = support::rollout_rows(support::random_sequences({6, 9}, 50, 1), {2, 2});
  batch.old_log_probs = at::full({batch.response_offsets.back()}, -4.0);
  batch.advantages = at::ones_like(batch.old_log_probs);
  return batch;
}

RolloutBatch critic_rows() {
  auto batch = support::rollout_rows(support::random_sequences({6, 9}, 50, 2), {2, 2});
  batch.values = at::zeros({batch.response_offsets.back()});
  batch.returns = at::ones_like(batch.values);
  return batch;
}

// A role of a run, updated once and saved.
class Role {
 public:
  Role(models::World& world,
       const converter::Checkpoint& origin,
       const fs::path& root,
       const std::string& name,
       const std::vector<int>& ranks)
      : is_actor_(name == "actor"),
        model_(world,
               tp(is_actor_ ? 2 : 1),
               is_actor_ ? origin.map.config : converter::with_value_head(origin.map.config),
               kBitwise,
               name,
               ranks),
        checkpoint_(world,
                    model_.pointers,
                    *model_.optimizer,
                    scheduler_,
                    {.name = name, .root = root / name, .origin = &origin, .threads = 1}) {
    converter::load_model(model_.chunks, origin, {.new_head = !is_actor_, .threads = 1});
    model_.optimizer->reload_model_params();
  }

  void update_and_save(WholeTensors& into) {
    model_.optimizer->zero_grad();
    const auto parts = split_micro_batches(2, 1);
    if (is_actor_) {
      update_actor(model_.pipeline(), actor_rows(), parts, {});
    } else {
      update_critic(model_.pipeline(), critic_rows(), parts, {});
    }
    model_.optimizer->step({.lr = 1e-2});
    collect(model_.chunks, into);
    checkpoint_.save_in_background(1, {});
    checkpoint_.finish_save();
    EXPECT_EQ(checkpoint_.load().iteration, 1);
  }
  const std::vector<models::GPTModel*>& chunks() const { return model_.pointers; }

 private:
  bool is_actor_;
  Trainee model_;
  OptimizerParamScheduler scheduler_{{.max_lr = 1e-2}};
  TrainingCheckpoint checkpoint_;
};

struct Outcome {
  WholeTensors actor{}, critic{}, rollout{};
};

TEST(DisjointRoles, AreWhatTheyAreAlone) {
  const support::TempDir dir;
  support::write_tiny_model({.head_dim = 16, .hidden = 64}, dir / "lm", 1);
  const auto origin = converter::open(dir / "lm");
  Outcome expected;
  models::run_ranks(2, {}, [&](models::World& world) {
    Role(world, origin, dir / "alone", "actor", {}).update_and_save(expected.actor);
  });
  models::run_ranks(1, {}, [&](models::World& world) {
    Role(world, origin, dir / "alone", "critic", {}).update_and_save(expected.critic);
  });
  Outcome got;
  models::run_ranks(4, {}, [&](models::World& world) {
    std::unique_ptr<Role> actor;
    std::unique_ptr<Role> critic;
    std::unique_ptr<models::ParallelState> mesh;
    std::vector<std::unique_ptr<models::GPTModel>> served;
    std::unique_ptr<rollout::LLMEngine> engine;
    RolloutWorker rollout;
    if (world.rank() < 2)
      actor = std::make_unique<Role>(world, origin, dir / "run", "actor", std::vector{0, 1});
    if (world.rank() == 2)
      critic = std::make_unique<Role>(world, origin, dir / "run", "critic", std::vector{2});
    if (world.rank() == 3) {
      mesh = std::make_unique<models::ParallelState>(world, tp(1), "rollout", std::vector{3});
      served = models::make_stage(origin.map.config, *mesh, kBitwise);
      engine = std::make_unique<rollout::LLMEngine>(
          *served.front(),
          rollout::EngineOptions{.max_num_seqs = 4, .max_model_len = 64, .num_blocks = 8});
      rollout = {served.front().get(), engine.get()};
    }
    HybridEngine hybrid(world, "hybrid", actor ? actor->chunks() : std::vector<models::GPTModel*>(),
                        nullptr, rollout, {.verify = true});
    if (actor) actor->update_and_save(got.actor);
    if (critic) critic->update_and_save(got.critic);
    const auto report = hybrid.rollout_mode();
    EXPECT_EQ(report.bytes_in_place + report.bytes_local, 0);
    EXPECT_EQ(report.bytes_sent > 0, actor != nullptr);
    EXPECT_EQ(report.bytes_received > 0, engine != nullptr);
    if (engine) collect(served, got.rollout);
    hybrid.train_mode();
    if (engine) {
      EXPECT_FALSE(engine->is_sleeping());
    }
  });
  EXPECT_EQ(support::first_difference(got.actor, expected.actor, 0), "");
  EXPECT_EQ(support::first_difference(got.critic, expected.critic, 0), "");
  EXPECT_EQ(support::first_difference(got.rollout, expected.actor, 0), "");
  for (const auto* const role : {"actor", "critic"})
    EXPECT_TRUE(
        converter::verify({.left = dir / "alone" / role, .right = dir / "run" / role}).identical())
        << role;
}

TEST(DisjointRoles, RefuseARolloutThatComputesInAnotherWayOnAllRanks) {
  models::run_ranks(3, {}, [](models::World& world) {
    const auto config = support::tiny_config({});
    const bool trains = world.rank() == 0;
    const bool generates = world.rank() == 2;
    const models::ParallelState mesh(world, {}, "of " + std::to_string(world.rank()),
                                     {world.rank()});
    const auto model = models::make_stage(
        config, mesh,
        {.alignment = generates ? models::Alignment::kFast : models::Alignment::kBitwise});
    rollout::LLMEngine engine(*model.front(),
                              {.max_num_seqs = 4, .max_model_len = 64, .num_blocks = 8});
    std::vector<models::GPTModel*> actor;
    if (trains) actor.push_back(model.front().get());
    const auto rollout = generates ? RolloutWorker{model.front().get(), &engine} : RolloutWorker{};
    EXPECT_TRUE(
        support::fails(ErrorKind::kUsage, {"alignment fast against alignment bitwise"},
                       [&] { HybridEngine(world, "hybrid", actor, nullptr, rollout, {}); }));
  });
}

}  // namespace disjoint_roles_test
}  // namespace ferry::trainer
