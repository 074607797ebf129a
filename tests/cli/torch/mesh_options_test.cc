// Options of a mesh, and the ranks that they make of this process.
#include <gtest/gtest.h>

#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "cli/torch/commands.h"
#include "distckpt/base/error.h"
#include "models/distributed/parallel_state.h"
#include "tests/support/remote/environment.h"

namespace ferry::cli {
namespace mesh_options_test {

MeshFlags parsed(const std::string& arguments) {
  CLI::App app;
  MeshFlags flags;
  add_mesh(app, flags);
  app.parse(arguments);
  return flags;
}

// The number of ranks that run, each of which sees the others.
int ranks_of(const std::string& arguments, int data_parallel_size = 1) {
  const support::Environment alone{{"RANK", ""}, {"WORLD_SIZE", ""}, {"SLURM_PROCID", ""}};
  std::mutex mutex;
  std::set<int> ranks;
  run_mesh(parsed(arguments), data_parallel_size, [&](models::World& world) {
    const std::lock_guard lock(mutex);
    ranks.insert(world.rank());
    EXPECT_LT(world.rank(), world.size());
  });
  return static_cast<int>(ranks.size());
}

TEST(MeshOptions, AreMegatronsSizesByTheirShortAndLongNames) {
  const auto parallel =
      parallel_of(parsed("--tp 2 --pipeline-model-parallel-size 3 --cp 4 --ep 5 "
                         "--pipeline-model-parallel-layout Et|tL"));
  EXPECT_EQ(parallel.tensor_model_parallel_size, 2);
  EXPECT_EQ(parallel.pipeline_model_parallel_size, 3);
  EXPECT_EQ(parallel.context_parallel_size, 4);
  EXPECT_EQ(parallel.expert_model_parallel_size, 5);
  EXPECT_EQ(parallel.pipeline_model_parallel_layout, "Et|tL");
}

TEST(MeshOptions, ExpertsAreSharedAsLayersAreUnlessToldOtherwise) {
  EXPECT_EQ(parallel_of(parsed("--tp 4")).expert_tensor_parallel(), 4);
  EXPECT_EQ(parallel_of(parsed("--tp 4 --etp 1")).expert_tensor_parallel(), 1);
}

TEST(MeshOptions, SayHowAndWhereTheModelComputes) {
  EXPECT_EQ(alignment_of(parsed("")), models::Alignment::kBitwise);
  EXPECT_EQ(alignment_of(parsed("--alignment fast")), models::Alignment::kFast);
  EXPECT_TRUE(world_options(parsed("")).device.is_cpu());
  EXPECT_TRUE(world_options(parsed("--device cuda")).device.is_cuda());
  EXPECT_EQ(world_options(parsed("--timeout 7")).timeout, std::chrono::seconds(7));
}

TEST(MeshOptions, RefuseSizesAndWordsThatAreNone) {
  for (const auto* const wrong :
       {"--tp 0", "--pp -1", "--ep x", "--timeout 0", "--alignment exact", "--device tpu"})
    EXPECT_THROW(parsed(wrong), CLI::ParseError) << wrong;
}

TEST(RunMesh, IsOneRankByItself) {
  EXPECT_EQ(ranks_of(""), 1);
}

TEST(RunMesh, HasARankForEachShareOfTheModel) {
  EXPECT_EQ(ranks_of("--tp 2 --pp 2"), 4);
  EXPECT_EQ(ranks_of("--cp 2"), 2);
}

TEST(RunMesh, HasTheFewestRanksThatSharesOfExpertsAndOfLayersDivide) {
  EXPECT_EQ(ranks_of("--tp 2 --ep 4 --etp 1"), 4);
  EXPECT_EQ(ranks_of("--tp 2 --ep 3 --etp 1"), 6);
}

TEST(RunMesh, HasCopiesOfTheModel) {
  EXPECT_EQ(ranks_of("--tp 2", 3), 6);
  EXPECT_EQ(ranks_of("--tp 2", 0), 2);
}

TEST(RunMesh, ThrowsWhatARankThrows) {
  EXPECT_THROW(
      run_mesh(parsed("--tp 2"), 1, [](models::World&) { throw Error(ErrorKind::kUsage, "no"); }),
      Error);
}

}  // namespace mesh_options_test
}  // namespace ferry::cli
