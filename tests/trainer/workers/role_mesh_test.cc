#include "trainer/workers/role_mesh.h"

#include <gtest/gtest.h>

#include "models/distributed/world.h"

namespace ferry::trainer {
namespace role_mesh_test {

TEST(RoleMesh, SaysTheSizesOfItsAxes) {
  models::run_ranks(4, {}, [](models::World& world) {
    const models::ParallelState mesh(
        world, {.tensor_model_parallel_size = 2, .pipeline_model_parallel_size = 2}, "mesh");
    EXPECT_EQ(describe(mesh.shape()), "TP 2  PP 2  CP 1  EP 1  DP 1");
  });
}

TEST(RoleMesh, IsPrintedInColumns) {
  EXPECT_EQ(
      describe({{.name = "actor", .ranks = {0, 1, 2, 3}, .shape = "TP 2"},
                {.name = "rollout", .ranks = {4, 5, 7}, .shape = "TP 1"},
                {.name = "critic", .ranks = {6}, .shape = "TP 1"}}),
      (std::vector<std::string>{"actor      ranks 0-3     TP 2", "rollout    ranks 4-5, 7  TP 1",
                                "critic     rank 6        TP 1"}));
}

}  // namespace role_mesh_test
}  // namespace ferry::trainer
