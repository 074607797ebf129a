#include "cli/plan_meshes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"

namespace ferry::cli {
namespace plan_meshes_test {

using Settings = std::vector<std::string>;

// The values of the keys behind their last dot, 1 where there is none.
class Sizes {
 public:
  explicit Sizes(const Settings& settings) {
    for (const auto& setting : settings) {
      const auto equals = setting.find('=');
      values_[setting.substr(0, equals)] = std::stoi(setting.substr(equals + 1));
    }
  }
  int operator[](const std::string& key) const {
    const auto found = values_.find(key);
    return found == values_.end() ? 1 : found->second;
  }

 private:
  std::map<std::string, int> values_;
};

trainer::PlannedRun run_of(double seconds) {
  trainer::PlannedRun run;
  run.plan.seconds = {{"step", seconds}};
  return run;
}

class PlanMeshes : public testing::Test {
 protected:
  MeshSpace space_{.ranks = 8, .layers = 4, .engine = "actor", .rollout = "rollout"};
};

// The learner is fastest with two ranks a layer, the rollout with four.
TEST_F(PlanMeshes, FindsTheFastestLearnerAndItsFastestRollout) {
  const auto found = plan_meshes(
      space_,
      [](const Settings& settings) {
        const Sizes sizes(settings);
        const int tp = sizes["actor.tensor_model_parallel_size"];
        const int pp = sizes["actor.pipeline_model_parallel_size"];
        const int rollout = sizes["rollout.tensor_model_parallel_size"];
        return run_of(10 * std::abs(tp - 2) + 10 * pp + std::abs(rollout - 4));
      },
      3);
  ASSERT_EQ(found.best.size(), 3U);
  EXPECT_EQ(found.best[0].settings,
            (Settings{"actor.tensor_model_parallel_size=2", "actor.pipeline_model_parallel_size=1",
                      "rollout.tensor_model_parallel_size=4"}));
  EXPECT_EQ(found.best[0].run.plan.step_seconds(), 10);
  EXPECT_TRUE(std::ranges::is_sorted(
      found.best, {}, [](const PlannedMesh& mesh) { return mesh.run.plan.step_seconds(); }));
  // 4 x 3 learners, and three more rollouts for each of eight.
  EXPECT_EQ(found.planned, 36U);
  EXPECT_EQ(found.fit, 36U);
}

TEST_F(PlanMeshes, SharesOutWholeExperts) {
  space_.experts = 16;
  std::mutex mutex;
  int most = 0;
  plan_meshes(
      space_,
      [&](const Settings& settings) {
        const Sizes sizes(settings);
        const int ep = sizes["actor.expert_model_parallel_size"];
        EXPECT_EQ(std::ranges::count(settings, "actor.expert_tensor_parallel_size=1"), ep > 1);
        const std::lock_guard lock(mutex);
        most = std::max(most, ep);
        return run_of(1);
      },
      1);
  EXPECT_EQ(most, 8);
}

TEST_F(PlanMeshes, LeavesWhatIsFixed) {
  space_.fixed = {"actor.tensor_model_parallel_size", "rollout.tensor_model_parallel_size"};
  const auto found = plan_meshes(
      space_,
      [](const Settings& settings) {
        EXPECT_EQ(settings.size(), 1U);
        return run_of(1);
      },
      10);
  EXPECT_EQ(found.planned, 3U);
}

TEST_F(PlanMeshes, CountsThoseThatDoNotFit) {
  space_.rollout.clear();
  const auto found = plan_meshes(
      space_,
      [](const Settings& settings) {
        auto run = run_of(1);
        if (Sizes(settings)["actor.tensor_model_parallel_size"] < 8)
          run.plan.misfits = {"too large"};
        return run;
      },
      10);
  EXPECT_EQ(found.planned, 12U);  // of 4 x 3 learners
  EXPECT_EQ(found.fit, 3U);
  EXPECT_EQ(found.best.size(), 3U);
}

// A rollout of one rank never fits, and that of the learner's size is one.
TEST_F(PlanMeshes, TriesOtherRolloutsWhereNoneFits) {
  space_.fixed = {"actor.tensor_model_parallel_size"};
  const auto found = plan_meshes(
      space_,
      [](const Settings& settings) {
        auto run = run_of(1);
        if (Sizes(settings)["rollout.tensor_model_parallel_size"] < 4)
          run.plan.misfits = {"too large"};
        return run;
      },
      100);
  EXPECT_EQ(found.fit, 3U * 2);
}

TEST_F(PlanMeshes, PassesOverMeshesThatAreNotPossible) {
  const auto found = plan_meshes(
      space_,
      [](const Settings& settings) {
        if (Sizes(settings)["actor.pipeline_model_parallel_size"] > 1)
          throw Error(ErrorKind::kUsage, "no");
        return run_of(1);
      },
      100);
  EXPECT_EQ(found.planned, 4U + 4 * 3);  // of the learners that are possible
}

TEST_F(PlanMeshes, SaysWhyNoneIsPossible) {
  const auto refuse = [](ErrorKind kind) {
    return [kind](const Settings&) -> trainer::PlannedRun {
      throw Error(kind, "the file is not there");
    };
  };
  EXPECT_THROW(plan_meshes(space_, refuse(ErrorKind::kUsage), 1), Error);
}

TEST_F(PlanMeshes, EndsWithAnyOtherFailure) {
  std::atomic<int> calls = 0;
  const auto once = [&](const Settings&) {
    if (calls++ == 5) throw Error(ErrorKind::kIo, "cannot read");
    return run_of(1);
  };
  EXPECT_THROW(plan_meshes(space_, once, 1), Error);
}

}  // namespace plan_meshes_test
}  // namespace ferry::cli
