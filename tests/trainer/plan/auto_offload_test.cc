#include "trainer/plan/auto_offload.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/models/planned_runs.h"
#include "trainer/plan/auto_settings.h"

namespace ferry::trainer {
namespace auto_offload_test {

using support::grpo;
using support::llama_8b;
using support::qwen3_30b_a3b;
using support::qwen3_32b;

constexpr std::int64_t kGiB = std::int64_t{1} << 30;
const std::string kMesh = "actor_rollout_ref.actor.megatron";

PpoConfig grpo_of_32b() {
  auto config = grpo();
  config.actor.megatron.parallel.tensor_model_parallel_size = 4;
  config.actor.megatron.sequence_parallel = false;
  config.rollout.tensor_model_parallel_size = 4;
  return config;
}
PpoConfig grpo_of_30b_a3b() {
  auto config = grpo();
  config.actor.megatron.parallel.expert_model_parallel_size = 4;
  config.rollout.expert_parallel_size = 4;
  return config;
}

// Four ranks of a host that has so much memory.
std::vector<HostShare> host_with(std::int64_t gib) {
  return std::vector<HostShare>(4, HostShare{.host = "node", .available = gib * kGiB});
}

struct Planned {
  Chosen<PpoConfig> chosen{};
  RunPlan plan{};

  const EngineConfig& actor() const { return chosen.config.actor.megatron; }
};

// On four H200.
Planned planned(const PpoConfig& config,
                const models::TransformerConfig& model,
                const std::vector<HostShare>& hosts = {}) {
  const auto device = *find_device("H200");
  const ModelsOfRun models{.actor = model, .critic = model};
  Planned result{.chosen = choose_settings(config, models, 4, device, hosts)};
  result.plan = plan_run(setup_of(result.chosen.config, models, 4, device));
  return result;
}

bool said(const std::vector<std::string>& lines, std::string_view part) {
  return std::ranges::any_of(
      lines, [&](const std::string& line) { return line.find(part) != std::string::npos; });
}

TEST(AutoOffload, IsNoneOfARunThatFitsWithout) {
  const auto run = planned(grpo(), llama_8b());
  EXPECT_TRUE(run.plan.fits());
  EXPECT_EQ(run.actor().optimizer_offload, false);
  EXPECT_EQ(run.actor().grad_offload, false);
  EXPECT_EQ(run.actor().param_offload, false);
  EXPECT_EQ(run.chosen.offload, std::vector<std::string>{});
}

// Masters and moments leave little of 80 GiB for the cache of 8B, so that few long answers are
// written at a time.
TEST(AutoOffload, IsOfARunThatFitsWithoutAndIsFasterWith) {
  const auto device = *find_device("H100");
  const ModelsOfRun models{.actor = llama_8b()};
  auto with = grpo();
  with.data.max_response_length = 2972;
  with.actor.ppo_mini_batch_size = 64;
  const auto chosen = choose_settings(with, models, 4, device);
  EXPECT_EQ(chosen.config.actor.megatron.optimizer_offload, true);
  EXPECT_TRUE(
      said(chosen.offload, "masters and moments of actor, 22.4 GiB, leave room that saves time"));
  auto without = with;
  without.actor.megatron.optimizer_offload = false;
  without.actor.megatron.grad_offload = false;
  const auto seconds = [&](const PpoConfig& config) {
    const auto run = choose_settings(config, models, 4, device).config;
    const auto plan = plan_run(setup_of(run, models, 4, device));
    EXPECT_TRUE(plan.fits());
    return plan.step_seconds();
  };
  EXPECT_LT(seconds(with), 0.85 * seconds(without));
}

TEST(AutoOffload, MakesADenseModelOf32BFit) {
  const auto run = planned(grpo_of_32b(), qwen3_32b());
  EXPECT_TRUE(run.plan.fits());
  EXPECT_EQ(run.actor().optimizer_offload, true);
  EXPECT_EQ(run.chosen.settings.front(), kMesh + ".optimizer_offload=true");
  EXPECT_TRUE(said(run.chosen.offload,
                   "masters and moments of actor, 91.5 GiB, do not fit beside the other "))
      << run.chosen.offload.front();
}

TEST(AutoOffload, MakesAMixtureOf30BFit) {
  const auto run = planned(grpo_of_30b_a3b(), qwen3_30b_a3b());
  EXPECT_TRUE(run.plan.fits());
  EXPECT_EQ(run.actor().optimizer_offload, true);
  EXPECT_TRUE(said(run.chosen.offload, "masters and moments of actor, 85.3 GiB, do not fit"))
      << run.chosen.offload.front();
}

// No other combination of these keys that fits takes less time.
TEST(AutoOffload, IsTheOneThatCostsLeast) {
  const auto run = planned(grpo_of_32b(), qwen3_32b());
  for (const bool optimizer : {false, true}) {
    for (const bool gradients : {false, true}) {
      auto config = grpo_of_32b();
      config.actor.megatron.optimizer_offload = optimizer;
      config.actor.megatron.grad_offload = gradients;
      const auto other = planned(config, qwen3_32b());
      EXPECT_TRUE(!other.plan.fits() || other.plan.step_seconds() >= run.plan.step_seconds())
          << optimizer << gradients;
    }
  }
}

TEST(AutoOffload, KeepsAValueThatIsSet) {
  auto config = grpo_of_32b();
  config.actor.megatron.optimizer_offload = false;
  const auto run = planned(config, qwen3_32b());
  EXPECT_EQ(run.actor().optimizer_offload, false);
  EXPECT_FALSE(run.plan.fits());
  EXPECT_EQ(run.actor().grad_offload, false);  // which does not make it fit
  EXPECT_TRUE(said(run.chosen.offload, "none suffices: with all that can rest on the host "));
}

TEST(AutoOffload, IsNotMoreThanTheHostHas) {
  const auto enough = planned(grpo_of_32b(), qwen3_32b(), host_with(367));
  EXPECT_EQ(enough.actor().optimizer_offload, true);
  const auto run = planned(grpo_of_32b(), qwen3_32b(), host_with(365));
  EXPECT_EQ(run.actor().optimizer_offload, false);
  EXPECT_FALSE(run.plan.fits());
  ASSERT_EQ(run.chosen.offload.size(), 1U);
  EXPECT_EQ(run.chosen.offload.front(),
            kMesh +
                ".optimizer_offload would fit the devices, but ranks 0-3 on node would pin 366.2 "
                "GiB of the host's memory, where 365.0 GiB are free; moments in bfloat16 "
                "(optim.exp_avg_dtype and exp_avg_sq_dtype) make masters and moments two thirds of "
                "that");
}

// A rollout with weights of its own leaves the actor's nothing to do on the device.
TEST(AutoOffload, HasParametersRestBesideARolloutWithACopy) {
  auto config = grpo_of_32b();
  config.rollout.tensor_model_parallel_size = 1;
  const auto device = *find_device("H200");
  const auto setup = setup_of(config, {.actor = qwen3_32b()}, 4, device);
  std::vector<std::string> names;
  for (const auto& key : open_offload_keys(setup)) names.push_back(key.key);
  EXPECT_EQ(names, (std::vector<std::string>{kMesh + ".grad_offload", kMesh + ".param_offload",
                                             kMesh + ".optimizer_offload"}));
  const auto run = planned(config, qwen3_32b());
  EXPECT_TRUE(run.plan.fits());
}

TEST(AutoOffload, IsOfEveryRole) {
  auto config = grpo();
  config.algorithm.adv_estimator = AdvantageEstimator::kGae;
  config.actor.use_kl_loss = true;
  const auto run = planned(config, llama_8b());
  EXPECT_TRUE(run.plan.fits());
  EXPECT_TRUE(run.actor().optimizer_offload.value() ||
              run.chosen.config.critic.megatron.optimizer_offload.value());
  EXPECT_TRUE(said(run.chosen.offload, "masters and moments of "));
}

TEST(AutoOffload, IsOfFineTuning) {
  SftConfig config;
  config.data.max_length = 2048;
  const auto device = *find_device("H200");
  config.engine.parallel.tensor_model_parallel_size = 4;
  const auto chosen = choose_settings(config, qwen3_32b(), 4, device);
  EXPECT_EQ(chosen.settings.front(), "engine.optimizer_offload=true");
  EXPECT_TRUE(plan_run(setup_of(chosen.config, qwen3_32b(), 4, device)).fits());
  ASSERT_EQ(chosen.offload.size(), 1U);
  EXPECT_TRUE(said(chosen.offload, "masters and moments of actor, 91.5 GiB, do not fit"));
  EXPECT_EQ(choose_settings(config, llama_8b(), 4, device).config.engine.optimizer_offload, false);
}

TEST(AutoOffload, IsNeverOfTheHostItself) {
  const DeviceSpec host{.name = "host", .memory = 64 * kGiB, .on_host = true};
  const auto chosen = choose_settings(grpo(), {.actor = llama_8b()}, 1, host);
  EXPECT_EQ(chosen.config.actor.megatron.optimizer_offload, false);
  EXPECT_EQ(chosen.offload, std::vector<std::string>{});
}

// A device whose rates are not known: the one that moves the fewest bytes.
TEST(AutoOffload, IsTheLeastOfADeviceThatIsNotKnown) {
  const DeviceSpec device{.name = "GPU", .memory = find_device("H200")->memory};
  const auto config =
      choose_settings(grpo_of_32b(), {.actor = qwen3_32b()}, 4, device).config.actor.megatron;
  EXPECT_EQ(config.optimizer_offload, true);
  EXPECT_EQ(config.grad_offload, false);
}

}  // namespace auto_offload_test
}  // namespace ferry::trainer
