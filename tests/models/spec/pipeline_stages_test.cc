#include "models/spec/pipeline_stages.h"

#include <gtest/gtest.h>

#include "tests/support/expect.h"

namespace ferry::models {
namespace pipeline_stages_test {

using support::fails;
using Stages = std::vector<int>;

ParallelConfig layout(std::string text, int stages) {
  return {.pipeline_model_parallel_size = stages,
          .pipeline_model_parallel_layout = std::move(text)};
}

TEST(PipelineStages, HandsChunksOutInTurn) {
  ParallelConfig parallel{.pipeline_model_parallel_size = 2,
                          .virtual_pipeline_model_parallel_size = 2};
  // Megatron-Core: chunk c lies on stage c % pp.
  EXPECT_EQ(pipeline_stages(parallel, 8, 0).layers, (Stages{0, 0, 1, 1, 0, 0, 1, 1}));
  EXPECT_EQ(pipeline_stages(parallel, 8, 0).layer_chunks, (Stages{0, 0, 0, 0, 1, 1, 1, 1}));
  EXPECT_EQ(pipeline_stages(parallel, 8, 0).num_chunks, 2);
  parallel.num_layers_in_first_pipeline_stage = 2;
  EXPECT_EQ(pipeline_stages(parallel, 8, 1).layers, (Stages{0, 1, 1, 1, 0, 1, 1, 1}));
  EXPECT_EQ(pipeline_stages(parallel, 8, 1).mtp, Stages{1});
  parallel.num_layers_in_first_pipeline_stage = 3;
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"--vpp 2", "3 layers", "1, 3"},
                    [&] { pipeline_stages(parallel, 8, 0); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"--vpp 2"},
                    [&] { pipeline_stages({.virtual_pipeline_model_parallel_size = 2}, 8, 0); }));
}

TEST(PipelineStages, OneStageCountsNeitherEmbeddingNorLoss) {
  const ParallelConfig embedding{.account_for_embedding_in_pipeline_split = true};
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"--account-for-embedding-in-pipeline-split: has no effect"},
                    [&] { pipeline_stages(embedding, 4, 0); }));
  const ParallelConfig loss{.account_for_loss_in_pipeline_split = true};
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"--account-for-loss-in-pipeline-split: has no effect"},
                    [&] { pipeline_stages(loss, 4, 0); }));
}

TEST(PipelineStages, CountsEmbeddingAndLossAsLayers) {
  ParallelConfig parallel{.pipeline_model_parallel_size = 4,
                          .account_for_embedding_in_pipeline_split = true,
                          .account_for_loss_in_pipeline_split = true};
  EXPECT_EQ(pipeline_stages(parallel, 6, 0).layers, (Stages{0, 1, 1, 2, 2, 3}));
  parallel.virtual_pipeline_model_parallel_size = 2;
  EXPECT_EQ(pipeline_stages(parallel, 6, 0).layers, (Stages{1, 2, 3, 0, 1, 2}));
  parallel.account_for_loss_in_pipeline_split = false;
  EXPECT_EQ(pipeline_stages(parallel, 7, 0).layers, (Stages{1, 2, 3, 0, 1, 2, 3}));
}

TEST(PipelineStages, ReadsMegatronsLayoutText) {
  const auto stages = pipeline_stages(layout("Et*3|(tt|)*2,t|mL", 5), 8, 1);
  EXPECT_EQ(stages.embedding, 0);
  EXPECT_EQ(stages.layers, (Stages{0, 0, 0, 1, 1, 2, 2, 3}));
  EXPECT_EQ(stages.mtp, Stages{4});
  EXPECT_EQ(stages.loss, 4);
  // Two chunks a stage.
  EXPECT_EQ(pipeline_stages(layout("Et|tt|t|L", 2), 4, 0).layers, (Stages{0, 1, 1, 0}));
  EXPECT_EQ(pipeline_stages(layout("Et|tt|t|L", 2), 4, 0).layer_chunks, (Stages{0, 0, 0, 1}));
  EXPECT_EQ(pipeline_stages(layout("Et|tt|t|L", 2), 4, 0).loss, 1);
}

TEST(PipelineStages, RefusesALayoutThatIsNotTheModels) {
  const auto refused = [](std::string text, int stages,
                          const std::vector<std::string_view>& words) {
    return fails(ErrorKind::kUsage, words,
                 [&] { pipeline_stages(layout(std::move(text), stages), 4, 0); });
  };
  EXPECT_TRUE(refused("Et*3|L", 2, {"3 layers", "4"}));
  EXPECT_TRUE(refused("Et*4|L", 3, {"2 chunks", "3 pipeline stages"}));
  EXPECT_TRUE(refused("t*4|L", 2, {"no embedding"}));
  EXPECT_TRUE(refused("Et*4", 1, {"no loss"}));
  EXPECT_TRUE(refused("tEt*3|L", 2, {"first"}));
  EXPECT_TRUE(refused("Et*4L|t*0", 2, {"number is expected"}));
  EXPECT_TRUE(refused("E(t*4|L", 2, {"not closed"}));
  EXPECT_TRUE(refused("Et*4|xL", 2, {"\"x\""}));
  EXPECT_TRUE(refused("Et*4m|L", 2, {"prediction"}));
  EXPECT_TRUE(refused("(t*99999)*99999", 2, {"too long"}));
  EXPECT_TRUE(refused("Et*99999999999999999999|L", 2, {"number is expected"}));
}

}  // namespace pipeline_stages_test
}  // namespace ferry::models
