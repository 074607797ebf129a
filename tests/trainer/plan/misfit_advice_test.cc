// Advice of plans for runs that do not fit.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "tests/support/models/planned_runs.h"
#include "trainer/plan/run_plan.h"

namespace ferry::trainer {
namespace misfit_advice_test {

const std::string kMegatron = "actor_rollout_ref.actor.megatron.";
const std::string kRollout = "actor_rollout_ref.rollout.";

// The advice for a phase, on four H200 with so many GiB.
std::string advice(const PpoConfig& config,
                   const models::TransformerConfig& model,
                   std::int64_t gib,
                   const std::string& phase) {
  auto device = *find_device("H200");
  device.memory = gib << 30;
  for (const auto& misfit : plan_run(setup_of(config, {.actor = model}, 4, device)).misfits)
    if (misfit.starts_with(phase + " ")) return misfit;
  return "";
}

bool has(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

TEST(MisfitAdvice, NamesTheRanksThatShareTheExpertsOfAMixture) {
  const auto mixture = support::qwen3_30b_a3b();
  for (const char* phase : {"gen", "update_actor"}) {
    const auto said = advice(support::grpo(), mixture, 40, phase);
    EXPECT_TRUE(has(said, kMegatron + "expert_model_parallel_size")) << said;
    EXPECT_EQ(has(said, kRollout + "expert_parallel_size"), phase == std::string("gen")) << said;
    EXPECT_FALSE(has(said, "offload")) << said;  // none of which would make it fit
  }
  auto config = support::grpo();
  config.actor.megatron.parallel.pipeline_model_parallel_size = 2;
  const auto said = advice(config, mixture, 100, "gen");
  EXPECT_TRUE(has(said, "more ranks for the rollout (" + kRollout + "expert_parallel_size"))
      << said;
}

TEST(MisfitAdvice, OfADenseModelHasNoExperts) {
  const auto said = advice(support::grpo(), support::llama_8b(), 40, "gen");
  EXPECT_FALSE(has(said, "expert")) << said;
  EXPECT_TRUE(has(said, kRollout + "tensor_model_parallel_size")) << said;
}

// Parameters that the rollout computes with cannot rest.
TEST(MisfitAdvice, OffersOffloadsThatMakeRoom) {
  auto config = support::grpo();
  const auto shared = advice(config, support::llama_8b(), 60, "gen");
  EXPECT_TRUE(has(shared, "optimizer_offload=true, for 22.4 GiB")) << shared;
  EXPECT_TRUE(has(shared, "grad_offload=true, for 29.9 GiB")) << shared;
  EXPECT_FALSE(has(shared, "param_offload")) << shared;
  config.rollout.tensor_model_parallel_size = 2;
  const auto apart = advice(config, support::llama_8b(), 60, "gen");
  EXPECT_TRUE(has(apart, "param_offload=true, for 15.0 GiB")) << apart;
}

}  // namespace misfit_advice_test
}  // namespace ferry::trainer
