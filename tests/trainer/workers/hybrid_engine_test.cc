#include "trainer/workers/hybrid_engine.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "models/pipeline_forward.h"
#include "models/transformer/packed_sequences.h"
#include "tests/support/models/tiny_training.h"

namespace ferry::trainer {
namespace hybrid_engine_test {

using models::Alignment;
using models::GPTModel;
using models::ParallelConfig;

struct Answer {
  std::vector<std::int64_t> tokens{};  // the prompt, then what was drawn
  std::vector<float> logprobs{};
};

Answer generate(rollout::LLMEngine& engine, std::vector<std::int64_t> prompt, std::int64_t tokens) {
  Answer answer{.tokens = prompt};
  engine.add_request("a", std::move(prompt),
                     {.temperature = 1, .seed = 5, .ignore_eos = true, .max_tokens = tokens});
  while (engine.has_unfinished()) {
    for (const auto& output : engine.step()) {
      EXPECT_FALSE(output.error);
      for (const auto& token : output.outputs.at(0).tokens) {
        answer.tokens.push_back(token.token_id);
        answer.logprobs.push_back(token.logprob);
      }
    }
  }
  return answer;
}

struct Case {
  const char* family;
  ParallelConfig actor, rollout;
};

// Weights change, go over, and are generated with: each time the log-probabilities are the bytes of
// a whole model that has those weights from the beginning.
TEST(HybridEngine, GeneratesWithTheWeightsThatTheActorHas) {
  for (const auto& one : {Case{"llama",
                               {.tensor_model_parallel_size = 2, .pipeline_model_parallel_size = 2},
                               {.tensor_model_parallel_size = 2}},
                          Case{"qwen2", {.pipeline_model_parallel_size = 4}, {}}}) {
    for (const int level : {1, 2}) {
      SCOPED_TRACE(fmt::format("{} sleep {}", one.family, level));
      auto config = support::tiny_config(
          {.family = one.family, .num_layers = 4, .head_dim = 16, .hidden = 64, .ffn = 96});
      config.max_position_embeddings = 256;
      models::run_ranks(4, {}, [&](models::World& world) {
        auto actor_parallel = one.actor;
        auto rollout_parallel = one.rollout;
        actor_parallel.make_vocab_size_divisible_by =
            rollout_parallel.make_vocab_size_divisible_by = 2;
        const models::ParallelState actor_mesh(world, actor_parallel, "actor");
        const models::ParallelState rollout_mesh(world, rollout_parallel, "rollout");
        const models::ModelOptions options{.alignment = Alignment::kBitwise};
        const auto actor = models::make_stage(config, actor_mesh, options);
        const auto served = models::make_stage(config, rollout_mesh, options);
        rollout::LLMEngine engine(*served.front(), {.max_num_seqs = 4, .num_blocks = 8});
        std::vector<GPTModel*> chunks;
        for (const auto& chunk : actor) chunks.push_back(chunk.get());
        Offload offload(chunks);
        HybridEngine hybrid(world, "hybrid", chunks, &offload, {served.front().get(), &engine},
                            {.offload = {.param = true}, .sleep_level = level, .verify = true});
        EXPECT_TRUE(engine.is_sleeping());
        EXPECT_THROW(hybrid.train_mode(), Error);

        models::World alone({});
        const models::ParallelState whole_mesh(alone, {.make_vocab_size_divisible_by = 2}, "whole");
        const auto whole = models::make_stage(config, whole_mesh, options);
        for (const std::uint64_t seed : {3, 4}) {
          for (auto* const chunk : chunks) support::fill_parameters(*chunk, seed);
          const auto report = hybrid.rollout_mode();
          EXPECT_EQ(report.bytes_in_place, 0);
          const auto answer = generate(engine, {1, 2, 3, 4, 5}, 20);
          hybrid.train_mode();
          support::fill_parameters(*whole.front(), seed);
          const at::NoGradGuard no_grad;
          const models::SequencePartition batch(
              models::pack({at::tensor(answer.tokens, at::kLong)}), whole_mesh);
          const auto expected =
              whole.front()
                  ->log_probs(whole.front()->forward(batch), batch.tokens_behind(1))
                  .log_probs;
          ASSERT_EQ(answer.logprobs.size(), 20U);
          EXPECT_EQ(std::memcmp(expected.const_data_ptr<float>() + 4, answer.logprobs.data(),
                                20 * sizeof(float)),
                    0)
              << seed;
          for (auto* const chunk : chunks) EXPECT_TRUE(chunk->parameters().not_finite().empty());
        }
      });
    }
  }
}

TEST(HybridEngine, RefusesARolloutThatComputesInAnotherWay) {
  models::World world({});
  const models::ParallelState mesh(world, {}, "mesh");
  const auto config = support::tiny_config({});
  const auto actor = models::make_stage(config, mesh, {.alignment = Alignment::kBitwise});
  const auto served = models::make_stage(config, mesh, {.alignment = Alignment::kFast});
  rollout::LLMEngine engine(*served.front(),
                            {.max_num_seqs = 4, .max_model_len = 64, .num_blocks = 8});
  EXPECT_THROW(HybridEngine(world, "hybrid", {actor.front().get()}, nullptr,
                            {served.front().get(), &engine}, {}),
               Error);
}

}  // namespace hybrid_engine_test
}  // namespace ferry::trainer
