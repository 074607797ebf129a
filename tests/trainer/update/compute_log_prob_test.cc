#include "trainer/update/compute_log_prob.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "models/distributed/world.h"
#include "models/pipeline_forward.h"
#include "tests/support/expect.h"
#include "tests/support/layout.h"
#include "tests/support/models/tiny_training.h"
#include "trainer/engine/micro_batches.h"

namespace ferry::trainer {
namespace compute_log_prob_test {

using models::ParallelConfig;
using support::Layout;

std::vector<AnswerLogProbs> run(models::World& world,
                                ParallelConfig parallel,
                                const std::vector<AnsweredPrompt>& prompts,
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
  return compute_log_prob({.chunks = pointers, .p2p = &p2p}, prompts, parts, 0.7);
}

TEST(ComputeLogProb, DoesNotDependOnTheMeshNorOnTheMicroBatches) {
  const auto config = support::tiny_config({.family = "qwen2", .num_layers = 4});
  const auto sequences = support::random_sequences({7, 20, 1, 33, 12, 16}, config.vocab_size, 1);
  // Everything behind the first token is an answer; and answers of 4, 1, 0, 28, 0 and 7 tokens.
  std::vector<AnsweredPrompt> whole;
  std::vector<AnsweredPrompt> prompts;
  for (const auto& tokens : sequences) {
    whole.push_back({.tokens = tokens, .num_prompt_tokens = 1});
    prompts.push_back(
        {.tokens = tokens, .num_prompt_tokens = std::vector{3, 19, 1, 5, 12, 9}[prompts.size()]});
  }
  models::World alone({});
  const auto expected = run(alone, {}, whole, split_micro_batches(sequences.size(), 1));
  ASSERT_EQ(expected.size(), sequences.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(expected[i].log_probs.size(0), sequences[i].size(0) - 1);
    EXPECT_TRUE(expected[i].log_probs.lt(0).all().item<bool>());
    EXPECT_TRUE(expected[i].entropys.gt(0).all().item<bool>());
  }
  for (const auto& layout :
       {Layout{"alone", 1, {}},
        Layout{"tp2 pp2", 4, {.tensor_model_parallel_size = 2, .pipeline_model_parallel_size = 2}},
        Layout{"cp2", 2, {.context_parallel_size = 2}},
        Layout{"pp2 vpp2",
               2,
               {.pipeline_model_parallel_size = 2, .virtual_pipeline_model_parallel_size = 2}}}) {
    for (const auto& parts : {split_micro_batches(sequences.size(), 3),
                              std::vector<Partition>{{5, 0}, {3, 2}, {1}, {4}}}) {
      for (const auto& given : {whole, prompts}) {
        SCOPED_TRACE(layout.name);
        models::run_ranks(layout.ranks, {}, [&](models::World& world) {
          const auto got = run(world, layout.parallel, given, parts);
          ASSERT_EQ(got.size(), expected.size());
          for (std::size_t i = 0; i < got.size(); ++i) {
            const auto answer = [&](const at::Tensor& all) {
              return all.narrow(0, given[i].num_prompt_tokens - 1, given[i].num_response_tokens());
            };
            EXPECT_TRUE(at::equal(got[i].log_probs, answer(expected[i].log_probs))) << i;
            EXPECT_TRUE(at::equal(got[i].entropys, answer(expected[i].entropys))) << i;
          }
        });
      }
    }
  }
}

// Tokens of the answers are drawn from some of the vocabulary, which follows them over the mesh.
TEST(ComputeLogProb, SamplingMasksFollowTheirTokens) {
  const auto config = support::tiny_config({.family = "qwen2", .num_layers = 4});
  const auto sequences = support::random_sequences({7, 20, 33, 12}, config.vocab_size, 2);
  std::vector<AnsweredPrompt> plain;
  for (const auto& tokens : sequences)
    plain.push_back(
        {.tokens = tokens, .num_prompt_tokens = 2 + 3 * static_cast<int>(plain.size())});
  auto masked = plain;
  auto all = plain;
  at::manual_seed(3);
  for (std::size_t i = 0; i < plain.size(); ++i) {
    const auto answer = plain[i].tokens.slice(0, plain[i].num_prompt_tokens);
    auto kept = at::rand({answer.size(0), config.vocab_size}) < 0.3;
    kept.scatter_(1, answer.unsqueeze(1), true);
    const auto mask_of = [](const at::Tensor& rows) {
      models::SamplingMask mask{.token_ids = at::nonzero(rows).select(1, 1), .offsets = {0}};
      for (const auto& row : rows.unbind())
        mask.offsets.push_back(mask.offsets.back() + row.sum().item<std::int64_t>());
      return mask;
    };
    masked[i].sampling_mask = mask_of(kept);
    all[i].sampling_mask = mask_of(at::ones_like(kept));
  }
  models::World alone({});
  const auto parts = split_micro_batches(sequences.size(), 1);
  const auto expected = run(alone, {}, masked, parts);
  const auto whole = run(alone, {}, plain, parts);
  const auto of_all = run(alone, {}, all, parts);
  for (std::size_t i = 0; i < plain.size(); ++i) {
    EXPECT_TRUE(at::equal(of_all[i].log_probs, whole[i].log_probs));
    EXPECT_TRUE(at::equal(of_all[i].entropys, whole[i].entropys));
    EXPECT_TRUE(expected[i].log_probs.gt(whole[i].log_probs).all().item<bool>());
  }
  for (const auto& layout :
       {Layout{"tp2 pp2", 4, {.tensor_model_parallel_size = 2, .pipeline_model_parallel_size = 2}},
        Layout{"cp2", 2, {.context_parallel_size = 2}}}) {
    SCOPED_TRACE(layout.name);
    models::run_ranks(layout.ranks, {}, [&](models::World& world) {
      const auto got = run(world, layout.parallel, masked, {{3, 0}, {2, 1}});
      for (std::size_t i = 0; i < got.size(); ++i) {
        EXPECT_TRUE(at::equal(got[i].log_probs, expected[i].log_probs)) << i;
        EXPECT_TRUE(at::equal(got[i].entropys, expected[i].entropys)) << i;
      }
    });
  }
  masked[1].sampling_mask = masked[0].sampling_mask;
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"a sampling mask of 5 tokens for an answer of 15"},
                             [&] { (void)run(alone, {}, masked, parts); }));
}

}  // namespace compute_log_prob_test
}  // namespace ferry::trainer
