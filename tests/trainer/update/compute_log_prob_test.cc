#include "trainer/update/compute_log_prob.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "models/distributed/world.h"
#include "models/pipeline_forward.h"
#include "tests/support/layout.h"
#include "tests/support/models/rollout_rows.h"
#include "tests/support/models/tiny_training.h"
#include "trainer/engine/micro_batches.h"

namespace ferry::trainer {
namespace compute_log_prob_test {

using models::ParallelConfig;
using support::Layout;

LogProbs run(models::World& world,
             ParallelConfig parallel,
             const RolloutBatch& batch,
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
  return compute_log_prob({.chunks = pointers, .p2p = &p2p}, batch, parts, 0.7);
}

TEST(ComputeLogProb, DoesNotDependOnTheMeshNorOnTheMicroBatches) {
  const auto config = support::tiny_config({.family = "qwen2", .num_layers = 4});
  const auto sequences = support::random_sequences({7, 20, 1, 33, 12, 16}, config.vocab_size, 1);
  // Everything behind the first token is a response; and responses of 4, 1, 0, 28, 0 and 7 tokens.
  const auto whole = support::rollout_rows(sequences, {1, 1, 1, 1, 1, 1});
  const auto some = support::rollout_rows(sequences, {3, 19, 1, 5, 12, 9});
  models::World alone({});
  const auto expected = run(alone, {}, whole, split_micro_batches(sequences.size(), 1));
  EXPECT_EQ(expected.log_probs.size(0), whole.offsets.back() - whole.size());
  EXPECT_TRUE(expected.log_probs.lt(0).all().item<bool>());
  EXPECT_TRUE(expected.entropys.gt(0).all().item<bool>());
  // The ends of the responses of `whole` are the responses of `some`.
  const auto ends = [&](const RolloutBatch& batch, const at::Tensor& of_whole) {
    std::vector<at::Tensor> rows;
    for (std::int64_t row = 0; row < batch.size(); ++row) {
      const auto all = whole.response_of(of_whole, row);
      rows.push_back(
          all.narrow(0, all.size(0) - batch.response_length(row), batch.response_length(row)));
    }
    return at::cat(rows);
  };
  for (const auto& layout :
       {Layout{"alone", 1, {}},
        Layout{"tp2 pp2", 4, {.tensor_model_parallel_size = 2, .pipeline_model_parallel_size = 2}},
        Layout{"cp2", 2, {.context_parallel_size = 2}},
        Layout{"pp2 vpp2",
               2,
               {.pipeline_model_parallel_size = 2, .virtual_pipeline_model_parallel_size = 2}}}) {
    for (const auto& parts : {split_micro_batches(sequences.size(), 3),
                              std::vector<Partition>{{5, 0}, {3, 2}, {1}, {4}}}) {
      for (const auto& given : {whole, some}) {
        SCOPED_TRACE(layout.name);
        models::run_ranks(layout.ranks, {}, [&](models::World& world) {
          const auto got = run(world, layout.parallel, given, parts);
          EXPECT_TRUE(at::equal(got.log_probs, ends(given, expected.log_probs)));
          EXPECT_TRUE(at::equal(got.entropys, ends(given, expected.entropys)));
        });
      }
    }
  }
}

// Tokens of the answers are drawn from some of the vocabulary, which follows them over the mesh.
TEST(ComputeLogProb, SamplingMasksFollowTheirTokens) {
  const auto config = support::tiny_config({.family = "qwen2", .num_layers = 4});
  const auto sequences = support::random_sequences({7, 20, 33, 12}, config.vocab_size, 2);
  const auto plain = support::rollout_rows(sequences, {2, 5, 8, 11});
  at::manual_seed(3);
  auto kept = at::rand({plain.response_offsets.back(), config.vocab_size}) < 0.3;
  for (std::int64_t row = 0; row < plain.size(); ++row)
    for (std::int64_t t = 0; t < plain.response_length(row); ++t)
      plain.response_of(kept, row)[t][plain.response(row)[static_cast<std::size_t>(t)]] = true;
  const auto with_mask = [&](const at::Tensor& rows) {
    auto batch = plain;
    batch.sampling_mask = {.token_ids = at::nonzero(rows).select(1, 1), .offsets = {0}};
    for (const auto& row : rows.unbind())
      batch.sampling_mask.offsets.push_back(batch.sampling_mask.offsets.back() +
                                            row.sum().item<std::int64_t>());
    return batch;
  };
  const auto masked = with_mask(kept);
  models::World alone({});
  const auto parts = split_micro_batches(sequences.size(), 1);
  const auto expected = run(alone, {}, masked, parts);
  const auto whole = run(alone, {}, plain, parts);
  const auto of_all = run(alone, {}, with_mask(at::ones_like(kept)), parts);
  EXPECT_TRUE(at::equal(of_all.log_probs, whole.log_probs));
  EXPECT_TRUE(at::equal(of_all.entropys, whole.entropys));
  EXPECT_TRUE(expected.log_probs.gt(whole.log_probs).all().item<bool>());
  for (const auto& layout :
       {Layout{"tp2 pp2", 4, {.tensor_model_parallel_size = 2, .pipeline_model_parallel_size = 2}},
        Layout{"cp2", 2, {.context_parallel_size = 2}}}) {
    SCOPED_TRACE(layout.name);
    models::run_ranks(layout.ranks, {}, [&](models::World& world) {
      const auto got = run(world, layout.parallel, masked, {{3, 0}, {2, 1}});
      EXPECT_TRUE(at::equal(got.log_probs, expected.log_probs));
      EXPECT_TRUE(at::equal(got.entropys, expected.entropys));
    });
  }
}

}  // namespace compute_log_prob_test
}  // namespace ferry::trainer
