// Gated delta nets on a GPU: steps of chunks and of decoded rows, alone and mixed, eager and in
// graphs, have the log-probabilities of the whole sequences: in kBitwise in every bit.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "distckpt/base/error.h"
#include "models/distributed/world.h"
#include "tests/support/models/engine_load.h"
#include "tests/support/models/tiny_training.h"

namespace ferry::rollout {
namespace delta_engine_test {

models::TransformerConfig hybrid_config(std::int64_t head_dim) {
  auto config = support::tiny_config({.family = "qwen3",
                                      .num_layers = 3,
                                      .head_dim = 64,
                                      .hidden = 256,
                                      .ffn = 512,
                                      .vocab = 1000});
  config.max_position_embeddings = 2048;
  config.linear_attention_freq = {true, true, false};
  config.linear_conv_kernel_dim = 4;
  config.linear_key_head_dim = head_dim;
  config.linear_value_head_dim = head_dim;
  config.linear_num_key_heads = 2;
  config.linear_num_value_heads = 4;
  config.attention_output_gate = true;
  config.layernorm_zero_centered_gamma = true;
  config.rotary_percent = 0.25;
  return config;
}

// The largest difference between what an engine drew and the whole sequences.
float difference_of_a_load(std::int64_t head_dim, models::Alignment alignment, bool eager) {
  const auto config = hybrid_config(head_dim);
  models::World world({.device = at::Device("cuda")});
  const models::ParallelState mesh(world, {}, "test");
  models::GPTModel model(config, mesh, models::stage_chunks(config, {}, 0)[0],
                         {.alignment = alignment});
  support::fill_parameters(model, 1);
  LLMEngine engine(model, {.max_num_seqs = 24,
                           .max_num_batched_tokens = 300,
                           .num_blocks = 60,
                           .enforce_eager = eager});
  const auto samples = support::run_load(
      engine, config.vocab_size,
      {.tokens = 2000, .longest_prompt = 200, .longest_output = 150, .arrivals = 4, .seed = 5});
  return support::largest_difference(model, samples);
}

// Heads of 128 channels have kernels, others ATen's formulas. Chunks round the operands of their
// products to bf16, single tokens do not: 0.29 on an H200.
TEST(DeltaEngine, OnAGpuItsFastStepsAreNearTheWholeSequences) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  for (const std::int64_t head_dim : {64, 128}) {
    for (const bool eager : {true, false})
      EXPECT_LT(difference_of_a_load(head_dim, models::Alignment::kFast, eager), 0.5F)
          << head_dim << (eager ? ", eager" : ", in graphs");
  }
}

TEST(DeltaEngine, OnAGpuItsBitwiseStepsAreTheWholeSequences) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  for (const bool eager : {true, false})
    EXPECT_EQ(difference_of_a_load(128, models::Alignment::kBitwise, eager), 0.0F)
        << (eager ? "eager" : "in graphs");
}

TEST(DeltaEngine, OnAGpuOtherHeadsAreNotBitwise) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  EXPECT_THROW((void)difference_of_a_load(64, models::Alignment::kBitwise, true), Error);
}

}  // namespace delta_engine_test
}  // namespace ferry::rollout
