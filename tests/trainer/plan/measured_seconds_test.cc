// Plans of runs that were measured on four H200: docs/benchmarks.md#a-step-of-grpo.
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "tests/support/models/planned_runs.h"
#include "trainer/plan/auto_settings.h"
#include "trainer/plan/run_plan.h"

namespace ferry::trainer {
namespace measured_seconds_test {

using Seconds = std::map<std::string, double>;

PpoConfig bitwise() {
  auto config = support::grpo();
  config.actor.megatron.alignment = models::Alignment::kBitwise;
  return config;
}

// Each phase within a tenth, with all that the plan chooses.
void expect_near(const PpoConfig& config,
                 const models::TransformerConfig& model,
                 const Seconds& measured) {
  const auto device = *find_device("H200");
  const auto chosen = choose_settings(config, {.actor = model}, 4, device).config;
  const auto plan = plan_run(setup_of(chosen, {.actor = model}, 4, device));
  ASSERT_TRUE(plan.fits());
  Seconds planned;
  for (const auto& phase : plan.seconds) planned[phase.name] = phase.seconds;
  for (const auto& [name, seconds] : measured)
    EXPECT_NEAR(planned.at(name), seconds, 0.1 * seconds) << name;
}

TEST(MeasuredSeconds, OfADenseModelOf8B) {
  expect_near(bitwise(), support::llama_8b(), {{"gen", 7.7}, {"update_actor", 11.5}});
}

TEST(MeasuredSeconds, OfADenseModelOf32BInTwoStages) {
  auto config = bitwise();
  config.actor.megatron.parallel.pipeline_model_parallel_size = 2;
  config.rollout.tensor_model_parallel_size = 2;
  expect_near(config, support::qwen3_32b(), {{"gen", 29.5}, {"update_actor", 69.6}});
}

TEST(MeasuredSeconds, OfADenseModelOf32BWhoseRanksShareLayers) {
  auto config = support::grpo();
  config.actor.megatron.alignment = models::Alignment::kFast;
  config.actor.megatron.parallel.tensor_model_parallel_size = 4;
  config.actor.megatron.sequence_parallel = false;
  config.rollout.tensor_model_parallel_size = 4;
  expect_near(config, support::qwen3_32b(),
              {{"gen", 29.5}, {"old_log_prob", 17.0}, {"update_actor", 67.6}});
}

TEST(MeasuredSeconds, OfAMixtureOf30B) {
  auto config = bitwise();
  config.data.max_response_length = 3026;
  config.actor.megatron.parallel.expert_model_parallel_size = 4;
  config.rollout.expert_parallel_size = 4;
  expect_near(config, support::qwen3_30b_a3b(), {{"gen", 69.5}, {"update_actor", 52.8}});
}

// State on the host streams at 0.87, 0.65 and 0.37 of the link on one, two and four devices. That
// makes four updates of 8B 10.9 s longer, over all ranks together, with four devices than with one;
// messages are the rest of the difference.
TEST(MeasuredSeconds, OfStateOnTheHostGrowWithTheDevicesThatShareIt) {
  auto config = bitwise();
  config.actor.megatron.optimizer_offload = true;
  config.actor.ppo_max_token_len_per_gpu = 4096;
  const auto device = *find_device("H200");
  const ModelsOfRun models{.actor = support::llama_8b()};
  const auto of_all = [&](int ranks) {
    const auto chosen = choose_settings(config, models, ranks, device).config;
    for (const auto& phase : plan_run(setup_of(chosen, models, ranks, device)).seconds)
      if (phase.name == "update_actor") return ranks * phase.seconds;
    return 0.0;
  };
  EXPECT_GT(of_all(1), 0);
  EXPECT_NEAR(of_all(4) - of_all(1), 10.9 + 2.6, 2.0);
}

}  // namespace measured_seconds_test
}  // namespace ferry::trainer
