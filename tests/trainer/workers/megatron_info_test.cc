#include "trainer/workers/megatron_info.h"

#include <gtest/gtest.h>

#include "models/distributed/world.h"

namespace ferry::trainer {
namespace megatron_info_test {

TEST(MegatronInfo, SaysWhatTheMeshSays) {
  models::run_ranks(4, {}, [](models::World& world) {
    const models::ParallelState mesh(
        world, {.tensor_model_parallel_size = 2, .pipeline_model_parallel_size = 2}, "mesh");
    EXPECT_EQ(get_megatron_global_info(mesh),
              (MegatronGlobalInfo{.tp_size = 2, .pp_size = 2, .etp_size = 2}));
    EXPECT_EQ(get_megatron_rank_info(mesh), (MegatronRankInfo{.tp_rank = world.rank() % 2,
                                                              .pp_rank = world.rank() / 2,
                                                              .etp_rank = world.rank() % 2}));
  });
}

TEST(MegatronInfo, IsPrintedInColumns) {
  const MegatronGlobalInfo actor{
      .tp_size = 2, .dp_size = 1, .pp_size = 2, .cp_size = 1, .ep_size = 1};
  EXPECT_EQ(describe({{.name = "actor", .ranks = {0, 1, 2, 3}, .info = actor},
                      {.name = "rollout", .ranks = {4, 5, 7}, .info = {.dp_size = 3}},
                      {.name = "critic", .ranks = {6}, .info = {}}}),
            (std::vector<std::string>{"actor      ranks 0-3     TP 2  PP 2  CP 1  EP 1  DP 1",
                                      "rollout    ranks 4-5, 7  TP 1  PP 1  CP 1  EP 1  DP 3",
                                      "critic     rank 6        TP 1  PP 1  CP 1  EP 1  DP 1"}));
}

}  // namespace megatron_info_test
}  // namespace ferry::trainer
