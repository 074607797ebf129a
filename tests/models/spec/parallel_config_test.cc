#include "models/spec/parallel_config.h"

#include <gtest/gtest.h>

#include <vector>

#include "distckpt/base/error.h"
#include "tests/support/expect.h"

namespace ferry::models {
namespace parallel_config_test {

using support::fails;
using Layers = std::vector<int>;

ParallelConfig pipeline(int stages,
                        std::optional<int> first = std::nullopt,
                        std::optional<int> last = std::nullopt) {
  return {.pipeline_model_parallel_size = stages,
          .num_layers_in_first_pipeline_stage = first,
          .num_layers_in_last_pipeline_stage = last};
}

TEST(ParallelConfig, PadsTheVocabularyAsMegatronDoes) {
  // Megatron-LM, _vocab_size_with_padding: up to a multiple of divisible_by * tp.
  const ParallelConfig config{.tensor_model_parallel_size = 8};
  EXPECT_EQ(config.padded_vocab_size(129'280), 130'048);  // 127 * 1024
  EXPECT_EQ((ParallelConfig{.tensor_model_parallel_size = 1}.padded_vocab_size(50257)), 50304);
  EXPECT_EQ((ParallelConfig{.tensor_model_parallel_size = 2}.padded_vocab_size(50257)), 50432);
  const ParallelConfig small{.tensor_model_parallel_size = 2, .make_vocab_size_divisible_by = 2};
  EXPECT_EQ(small.padded_vocab_size(250), 252);
  EXPECT_EQ(small.padded_vocab_size(252), 252);
}

TEST(ParallelConfig, SharesLayersOutEvenly) {
  EXPECT_EQ(pipeline(1).layers_per_stage(61), Layers{61});
  EXPECT_EQ(pipeline(4).layers_per_stage(32), (Layers{8, 8, 8, 8}));
}

TEST(ParallelConfig, GivesFirstAndLastStageWhatIsAsked) {
  // DeepSeek-V3 over 16 stages: 4 layers each, one in the last.
  Layers expected(16, 4);
  expected.back() = 1;
  EXPECT_EQ(pipeline(16, std::nullopt, 1).layers_per_stage(61), expected);
  EXPECT_EQ(pipeline(4, 1).layers_per_stage(10), (Layers{1, 3, 3, 3}));
  EXPECT_EQ(pipeline(4, 1, 3).layers_per_stage(10), (Layers{1, 3, 3, 3}));
  EXPECT_EQ(pipeline(2, 3, 1).layers_per_stage(4), (Layers{3, 1}));
  EXPECT_EQ(pipeline(2, 3).layers_per_stage(4), (Layers{3, 1}));
}

TEST(ParallelConfig, RefusesLayersThatCannotBeSharedOut) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"61 of 61 layers", "16 pipeline stages", "hint"},
                    [] { pipeline(16).layers_per_stage(61); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"2 pipeline stages"},
                    [] { pipeline(4, 1, 2).layers_per_stage(8); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"1 of 5"}, [] { pipeline(2, 2, 2).layers_per_stage(5); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"--num-layers-in-first-pipeline-stage is 9"},
                    [] { pipeline(2, 9).layers_per_stage(8); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"--num-layers-in-last-pipeline-stage is 0"},
                    [] { pipeline(2, std::nullopt, 0).layers_per_stage(8); }));
  EXPECT_EQ(pipeline(1, 8).layers_per_stage(8), Layers{8});
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"the one stage has all 8 layers"},
                    [] { pipeline(1, 7).layers_per_stage(8); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"0 of 8 layers", "1 pipeline stages"},
                    [] { pipeline(2, 8).layers_per_stage(8); }));
}

}  // namespace parallel_config_test
}  // namespace ferry::models
