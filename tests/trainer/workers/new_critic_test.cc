// A critic that begins as a language model, from its checkpoint to its own and back to Hugging
// Face.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <string>
#include <vector>

#include "converter/alignment/model_files.h"
#include "converter/convert.h"
#include "converter/verify.h"
#include "tests/support/expect.h"
#include "tests/support/models/rollout_rows.h"
#include "tests/support/models/trainee.h"
#include "tests/support/temp_dir.h"
#include "trainer/engine/micro_batches.h"
#include "trainer/engine/training_checkpoint.h"
#include "trainer/update/compute_values.h"
#include "trainer/update/update_critic.h"

namespace ferry::trainer {
namespace new_critic_test {

using models::Head;
using support::TempDir;
using support::Trainee;
using support::WholeTensors;

struct Case {
  const char* name;
  support::TinyModel model;
  int ranks = 1;
  models::ParallelConfig parallel{};

  friend void PrintTo(const Case& one, std::ostream* out) { *out << one.name; }
};

class NewCritic : public ::testing::TestWithParam<Case> {};

void collect(const Trainee& critic, WholeTensors& into) {
  for (const auto* const chunk : critic.pointers) {
    for (const auto& parameter : chunk->parameters().all())
      into.add(parameter.spec, parameter.value.clone());
  }
}

void train(const Trainee& critic, int step) {
  auto batch = support::rollout_rows(
      support::random_sequences({8, 6}, 50, static_cast<std::uint64_t>(step)), {2, 2});
  batch.values = at::zeros({batch.response_offsets.back()});
  batch.returns = at::ones_like(batch.values);
  critic.optimizer->zero_grad();
  update_critic(critic.pipeline(), batch, split_micro_batches(2, 1), {});
  critic.optimizer->step({.lr = 1e-2});
}

TEST_P(NewCritic, IsTheBodyOfALanguageModelAndAHeadOfZerosAndGoesOnFromItsOwnCheckpoint) {
  const auto& [name, tiny, ranks, parallel] = GetParam();
  const TempDir dir;
  support::write_tiny_model(tiny, dir / "lm", 1);
  const auto origin = converter::open(dir / "lm");
  const auto config = converter::with_value_head(origin.map.config);
  EXPECT_EQ(config.head, Head::kTokenClassification);
  EXPECT_EQ(config.num_labels, 1);
  WholeTensors body;
  models::World alone({});
  {
    const Trainee whole(alone, {}, origin.map.config, {});
    converter::load_model(whole.chunks, origin, {.threads = 1});
    collect(whole, body);
  }
  WholeTensors loaded;
  WholeTensors straight;
  WholeTensors resumed;
  const CheckpointConfig folder{.root = dir / "run", .origin = &origin, .threads = 1};
  models::run_ranks(ranks, {}, [&](models::World& world) {
    const Trainee critic(world, parallel, config, {});
    const auto report =
        converter::load_model(critic.chunks, origin, {.new_head = true, .threads = 1});
    EXPECT_EQ(report.from_zero, (std::vector<std::string>{"score.weight", "score.bias"}));
    collect(critic, loaded);
    critic.optimizer->reload_model_params();
    const auto sequences = support::random_sequences({5, 9}, 50, 1);
    for (const auto& values :
         compute_values(critic.pipeline(), sequences, split_micro_batches(2, 1)))
      EXPECT_TRUE(values.eq(0).all().item<bool>());
    OptimizerParamScheduler scheduler{{.max_lr = 1e-2}};
    TrainingCheckpoint checkpoint(world, critic.pointers, *critic.optimizer, scheduler, folder);
    train(critic, 1);
    checkpoint.save(1, {});
    train(critic, 2);
    collect(critic, straight);
    train(critic, 3);
    EXPECT_EQ(checkpoint.load().iteration, 1);
    train(critic, 2);
    collect(critic, resumed);
  });
  for (const auto& [key, tensor] : loaded.all()) {
    if (key.starts_with("output_layer")) {
      EXPECT_TRUE(tensor.eq(0).all().item<bool>()) << key;
    } else {
      const auto& there = body.all().at(key);
      EXPECT_TRUE(at::equal(tensor.narrow(0, 0, std::min(tensor.size(0), there.size(0))),
                            there.narrow(0, 0, std::min(tensor.size(0), there.size(0)))))
          << key;
    }
  }
  EXPECT_GT(straight.all().at("output_layer.weight").abs().sum().item<float>(), 0);
  EXPECT_EQ(support::first_difference(resumed, straight, 0), "");

  // Goes to Hugging Face and back; loaded whole where a new head would have been taken, too.
  converter::convert({.from = dir / "run", .to = dir / "hf", .threads = 1});
  converter::convert({.from = dir / "hf", .to = dir / "back", .threads = 1});
  EXPECT_TRUE(converter::verify({.left = dir / "run", .right = dir / "back"}).identical());
  const auto hf = converter::open(dir / "hf");
  EXPECT_EQ(hf.map.config, config);
  const Trainee again(alone, {}, converter::with_value_head(hf.map.config), {});
  EXPECT_TRUE(
      converter::load_model(again.chunks, hf, {.new_head = true, .threads = 1}).from_zero.empty());
  const auto saved = converter::open(dir / "run");
  const Trainee expected(alone, {}, config, {});
  converter::load_model(expected.chunks, saved, {.threads = 1});
  WholeTensors a;
  WholeTensors b;
  collect(again, a);
  collect(expected, b);
  EXPECT_EQ(support::first_difference(a, b, 0), "");
}

INSTANTIATE_TEST_SUITE_P(
    All,
    NewCritic,
    ::testing::Values(
        Case{"untied", {}},
        Case{"untied_tp2", {}, 2, {.tensor_model_parallel_size = 2}},
        Case{"tied_tp2", {.family = "qwen2", .tied = true}, 2, {.tensor_model_parallel_size = 2}},
        Case{"tied_pp2",
             {.family = "qwen2", .tied = true, .repeat_tied_head = true},
             2,
             {.pipeline_model_parallel_size = 2}},
        Case{"experts_pp2",
             {.family = "qwen3_moe", .experts = 8},
             2,
             {.pipeline_model_parallel_size = 2}},
        Case{"prediction_layers", {.family = "deepseek_v3", .experts = 8, .prediction_layers = 1}}),
    [](const auto& test) { return test.param.name; });

TEST(NewHead, IsGivenToNoneButALanguageModelsCheckpoint) {
  const TempDir dir;
  models::World alone({});
  const auto refuses = [&](const support::TinyModel& stored, const support::TinyModel& wanted,
                           bool new_head, std::string_view tensor) {
    const auto folder = dir / fmt::format("{}{}{}", stored.head, stored.labels, stored.tied);
    if (!std::filesystem::exists(folder)) support::write_tiny_model(stored, folder, 1);
    const Trainee model(alone, {}, support::tiny_config(wanted), {});
    return support::fails(ErrorKind::kLayout, {tensor}, [&] {
      converter::load_model(model.chunks, converter::open(folder),
                            {.new_head = new_head, .threads = 1});
    });
  };
  EXPECT_TRUE(refuses({}, {.head = "Token"}, false, "lm_head.weight"));
  EXPECT_TRUE(refuses({.tied = true}, {.tied = true, .head = "Token"}, false, "score.weight"));
  EXPECT_TRUE(refuses({.head = "Sequence"}, {.head = "Token"}, true, "score.bias"));
  EXPECT_TRUE(refuses({.head = "Token", .labels = 2}, {.head = "Token"}, true, "score.weight"));
  EXPECT_TRUE(refuses({.head = "Token"}, {}, true, "score.weight"));
}

}  // namespace new_critic_test
}  // namespace ferry::trainer
