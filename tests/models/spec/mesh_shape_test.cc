#include "models/spec/mesh_shape.h"

#include <gtest/gtest.h>

#include "tests/support/expect.h"

namespace ferry::models {
namespace mesh_shape_test {

using support::fails;

// Megatron-Core's order tp-cp-ep-dp-pp: rank = tp + 2 cp + 4 dp + 8 pp.
TEST(MeshShape, NumbersRanksAsMegatronDoes) {
  const MeshShape mesh({.tensor_model_parallel_size = 2,
                        .pipeline_model_parallel_size = 2,
                        .context_parallel_size = 2},
                       16);
  EXPECT_EQ(mesh.dp(), 2);
  const auto at = mesh.coordinates(1 + 2 * 0 + 4 * 1 + 8 * 1);
  EXPECT_EQ(at.tp, 1);
  EXPECT_EQ(at.cp, 0);
  EXPECT_EQ(at.dp, 1);
  EXPECT_EQ(at.pp, 1);
}

// Experts within a stage of 8 ranks: rank = etp + 1 ep + 4 edp.
TEST(MeshShape, ExpertsHaveANumberingOfTheirOwn) {
  const MeshShape mesh({.tensor_model_parallel_size = 2,
                        .pipeline_model_parallel_size = 2,
                        .expert_model_parallel_size = 4,
                        .expert_tensor_parallel_size = 1},
                       16);
  EXPECT_EQ(mesh.edp(), 2);
  const auto at = mesh.coordinates(8 + 7);
  EXPECT_EQ(at.etp, 0);
  EXPECT_EQ(at.ep, 3);
  EXPECT_EQ(at.edp, 1);
  EXPECT_EQ(at.tp, 1);
  EXPECT_EQ(at.dp, 3);
}

TEST(MeshShape, RefusesAWorldThatItDoesNotFill) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"6 ranks are no multiple of tp 4 x cp 1 x pp 1"},
                    [] { MeshShape({.tensor_model_parallel_size = 4}, 6); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"4 ranks are no multiple of etp 1 x ep 3 x pp 1"},
                    [] { MeshShape({.expert_model_parallel_size = 3}, 4); }));
}

TEST(MeshShape, RefusesASizeOfNothing) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"cp is 0, it has to be 1 at least"},
                    [] { MeshShape({.context_parallel_size = 0}, 4); }));
}

}  // namespace mesh_shape_test
}  // namespace ferry::models
