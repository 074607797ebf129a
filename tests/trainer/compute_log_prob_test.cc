#include "trainer/compute_log_prob.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "models/pipeline_forward.h"
#include "models/world.h"
#include "tests/support/tiny_training.h"
#include "trainer/micro_batches.h"

namespace ferry::trainer {
namespace {

using distckpt::ParallelConfig;

struct Layout {
  const char* name;
  int ranks;
  ParallelConfig parallel;
};

std::vector<SequenceLogProbs> run(models::World& world, ParallelConfig parallel, const std::vector<at::Tensor>& sequences,
                                  const std::vector<Partition>& parts) {
  parallel.make_vocab_size_divisible_by = 2;
  const models::ParallelState mesh(world, parallel, "mesh");
  const auto config = support::tiny_config({.family = "qwen2", .num_layers = 4});
  const auto chunks = models::make_stage(config, mesh, {.alignment = models::Alignment::kBitwise});
  std::vector<models::GPTModel*> pointers;
  for (const auto& chunk : chunks) {
    support::fill_parameters(*chunk, 5);
    pointers.push_back(chunk.get());
  }
  const P2PCommunicator p2p(world, mesh, "p2p", chunks.size() > 1);
  return compute_log_prob({.chunks = pointers, .p2p = &p2p}, sequences, parts, 0.7);
}

TEST(ComputeLogProb, DoesNotDependOnTheMeshNorOnTheMicroBatches) {
  const auto config = support::tiny_config({.family = "qwen2", .num_layers = 4});
  const auto sequences = support::random_sequences({7, 20, 1, 33, 12, 16}, config.vocab_size, 1);
  models::World alone({});
  const auto expected = run(alone, {}, sequences, split_micro_batches(sequences.size(), 1));
  ASSERT_EQ(expected.size(), sequences.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(expected[i].log_probs.size(0), sequences[i].size(0) - 1);
    EXPECT_TRUE(expected[i].log_probs.lt(0).all().item<bool>());
    EXPECT_TRUE(expected[i].entropys.gt(0).all().item<bool>());
  }
  for (const auto& layout : {Layout{"alone", 1, {}}, Layout{"tp2 pp2", 4, {.tensor_model_parallel_size = 2, .pipeline_model_parallel_size = 2}},
                             Layout{"cp2", 2, {.context_parallel_size = 2}},
                             Layout{"pp2 vpp2", 2, {.pipeline_model_parallel_size = 2, .virtual_pipeline_model_parallel_size = 2}}}) {
    for (const auto& parts : {split_micro_batches(sequences.size(), 3), std::vector<Partition>{{5, 0}, {3, 2}, {1}, {4}}}) {
      SCOPED_TRACE(layout.name);
      models::run_ranks(layout.ranks, {}, [&](models::World& world) {
        const auto got = run(world, layout.parallel, sequences, parts);
        ASSERT_EQ(got.size(), expected.size());
        for (std::size_t i = 0; i < got.size(); ++i) {
          EXPECT_TRUE(at::equal(got[i].log_probs, expected[i].log_probs)) << i;
          EXPECT_TRUE(at::equal(got[i].entropys, expected[i].entropys)) << i;
        }
      });
    }
  }
}

}  // namespace
}  // namespace ferry::trainer
