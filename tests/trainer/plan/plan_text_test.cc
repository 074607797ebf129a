#include "trainer/plan/plan_text.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "tests/support/models/planned_runs.h"

namespace ferry::trainer {
namespace plan_text_test {

PlannedRun run_of(const PpoConfig& config, int ranks) {
  const auto model = support::llama_8b();
  PlannedRun run{
      .setup = setup_of(config, {.actor = model, .critic = model}, ranks, *find_device("H200")),
      .choice = {.settings = {"optim.lr=1e-06"}, .offload = {"gradients rest there"}}};
  run.plan = plan_run(run.setup);
  return run;
}

// The line that begins with `words`; "" if there is none.
std::string line_of(const std::string& text, const std::string& words) {
  const auto begin = text.find('\n' + words);
  if (begin == text.npos) return "";
  return text.substr(begin + 1, text.find('\n', begin + 1) - begin - 1);
}

TEST(PlanText, SaysWhatEachPhaseHasOnTheDeviceAndOnTheHost) {
  auto config = support::grpo();
  config.actor.megatron.optimizer_offload = true;
  const auto run = run_of(config, 4);
  const auto text = plan_text(run);
  const auto columns = line_of(text, "phase");
  for (const char* const part : {"weights", "gradients", "kv_cache", "activations", "host"})
    EXPECT_NE(columns.find(part), columns.npos) << part << ": " << text;
  EXPECT_EQ(columns.find("replicas"), columns.npos);  // nothing has any
  for (const auto& phase : run.plan.ranks.front().phases) {
    const auto line = line_of(text, phase.name);
    const auto host = fmt::format("{:.1f}", static_cast<double>(phase.bytes.host) / (1 << 30));
    EXPECT_TRUE(line.ends_with(host)) << line;
  }
  EXPECT_TRUE(line_of(text, "step         ").ends_with("tokens/s on each device")) << text;
  EXPECT_EQ(line_of(text, "chosen"), "chosen     optim.lr=1e-06");
  EXPECT_EQ(line_of(text, "offload"), "offload    gradients rest there");
}

TEST(PlanText, HasTheMeshesInColumns) {
  auto config = support::grpo();
  config.actor.ranks = {0, 1, 2, 3};
  config.actor.megatron.parallel.tensor_model_parallel_size = 2;
  config.rollout.ranks = {4, 5, 7};
  const auto text = plan_text(run_of(config, 8));
  EXPECT_EQ(line_of(text, "actor"), "actor      ranks 0-3     TP 2  PP 1  CP 1  EP 1  DP 2");
  EXPECT_EQ(line_of(text, "rollout"), "rollout    ranks 4-5, 7  TP 1  PP 1  CP 1  EP 1  DP 3");
}

TEST(PlanText, LeavesOutRanksWhoseDevicesAreLessFull) {
  auto config = support::grpo();
  config.actor.megatron.parallel.pipeline_model_parallel_size = 4;
  const auto run = run_of(config, 4);
  ASSERT_EQ(run.plan.ranks.size(), 4U);
  const auto whole = plan_text(run), part = plan_text(run, 1);
  const auto tables = [](const std::string& text) {
    std::size_t count = 0;
    for (auto at = text.find("; GiB\n"); at != text.npos; at = text.find("; GiB\n", at + 1))
      ++count;
    return count;
  };
  EXPECT_EQ(tables(whole), 4U);
  EXPECT_EQ(tables(part), 1U);
  EXPECT_NE(part.find("\n3 more groups of ranks take no more\n"), part.npos) << part;
  const auto fullest = std::ranges::max_element(run.plan.ranks, {}, [](const RankPlan& group) {
    std::int64_t most = 0;
    for (const auto& phase : group.phases) most = std::max(most, phase.bytes.on_device());
    return most;
  });
  EXPECT_NE(part.find(fmt::format("\nrank {}: ", fullest->ranks.front())), part.npos) << part;
}

}  // namespace plan_text_test
}  // namespace ferry::trainer
