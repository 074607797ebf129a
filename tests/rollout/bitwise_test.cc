// Whatever load the engine has, the log-probabilities that it reports have the bytes of the
// trainer's forward of the finished sequences: random arrivals, chunks of prompts, preemption,
// shared beginnings, several samples of a prompt; on one rank and on several, of all kinds of
// models. The same of the experts that tokens went to.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "models/distributed/world.h"
#include "tests/support/models/engine_load.h"
#include "tests/support/models/tiny_training.h"

namespace ferry::rollout {
namespace bitwise_test {

using distckpt::DType;
using models::Alignment;
using models::GPTModel;

struct Case {
  const char* name;
  support::TinyModel model{};
  models::ParallelConfig parallel{};
  int ranks = 1;
  std::optional<std::int64_t> window{};
  DType dtype = DType::kBF16;
  bool gpt_oss = false;  // with what GPT-OSS has and Mixtral has not
  bool hybrid = false;   // with what Qwen3-Next has and Qwen3 has not
  bool gemma = false;    // with what Gemma 2 and 3 and Ministral 3 have and Qwen3 has not
};

void PrintTo(const Case& one, std::ostream* out) {
  *out << one.name;
}

class BitwiseRollout : public testing::TestWithParam<Case> {
 protected:
  // A second thread takes longer to wake than to compute with tiny tensors.
  static void SetUpTestSuite() { at::set_num_threads(1); }
};

void make_gemma(models::TransformerConfig& config) {
  config.window_attn_skip_freq = {true, false};
  config.rotary_base_local = 700;
  config.rope_scaling = {.type = models::RopeType::kLinear,
                         .factor = 8,
                         .original_max_position_embeddings = 16,
                         .llama_4_scaling_beta = 0.1};
  config.softmax_scale = 0.3;
  config.layernorm_zero_centered_gamma = true;
  config.post_norm = models::PostNorm::kOfLinear;
  config.activation = models::Activation::kGeluTanh;
  config.embedding_scaling = true;
  config.attn_logit_softcapping = 5;
  config.final_logit_softcapping = 8;
}

GPTModel make_model(const models::TransformerConfig& config,
                    const models::ParallelState& mesh,
                    DType dtype) {
  return GPTModel(config, mesh, models::stage_chunks(config, mesh.shape().parallel(), 0)[0],
                  {.alignment = Alignment::kBitwise, .dtype = dtype});
}

TEST_P(BitwiseRollout, LogprobsAreTheTrainers) {
  const auto& param = GetParam();
  auto config = support::tiny_config(param.model);
  config.max_position_embeddings = 512;
  config.sliding_window = param.window;
  if (param.gpt_oss) support::make_gpt_oss(config);
  if (param.hybrid) support::make_hybrid(config);
  if (param.gemma) make_gemma(config);
  models::run_ranks(param.ranks, {}, [&](models::World& world) {
    at::set_num_threads(1);
    const models::ParallelState mesh(world, param.parallel, "rollout");
    auto model = make_model(config, mesh, param.dtype);
    support::fill_parameters(model, 1);
    // The trainer's mesh is another one.
    models::World alone({});
    const models::ParallelState whole(alone, {.make_vocab_size_divisible_by = 8}, "trainer");
    auto trainer = make_model(config, whole, param.dtype);
    support::fill_parameters(trainer, 1);
    const auto expect_equal = [&](EngineOptions options, const support::Load& load) {
      options.enable_return_routed_experts = config.num_moe_experts > 0;
      LLMEngine engine(model, options);
      const auto samples = support::run_load(engine, config.vocab_size, load);
      EXPECT_EQ(support::count_unequal(trainer, samples, 1), 0);
      EXPECT_EQ(support::count_unequal(trainer, samples, 5), 0);
      if (options.enable_return_routed_experts) {
        EXPECT_EQ(support::count_other_routes(trainer, samples), 0);
      }
      EXPECT_EQ(engine.stats().num_free_blocks, engine.stats().num_blocks);
      return engine.stats();
    };
    const auto groups = std::ssize(kv_cache_groups(config).windows);
    // Data parallel ranks have requests of their own.
    const auto seed = static_cast<std::uint64_t>(mesh.coordinates().dp);
    const auto few_blocks =
        expect_equal({.max_num_seqs = 8,
                      .max_num_batched_tokens = 40,
                      .num_blocks = groups * (param.hybrid ? 6 : 8)},
                     {.tokens = param.ranks == 1 ? 400 : 200, .seed = 1 + seed});
    EXPECT_GT(few_blocks.num_preemptions, 0);
    EXPECT_GT(few_blocks.cached_tokens, 0);
    expect_equal({.max_num_seqs = 32,
                  .max_num_batched_tokens = 500,
                  .num_blocks = 200,
                  .enable_prefix_caching = false},
                 {.tokens = 400 / param.ranks, .arrivals = 20, .seed = 3 + seed});
    expect_equal({.max_num_seqs = 1,
                  .max_num_batched_tokens = 512,
                  .num_blocks = groups * 8,
                  .enable_chunked_prefill = false},
                 {.tokens = 60, .longest_output = 20, .seed = 5 + seed});
  });
}

// Sums over keys are cut into blocks: where a sequence is in the middle of one must not matter.
TEST(LongContexts, LogprobsAreTheTrainers) {
  at::set_num_threads(1);
  auto config = support::tiny_config({.family = "qwen2",
                                      .num_layers = 1,
                                      .heads_per_group = 7,
                                      .head_dim = 64,
                                      .hidden = 128,
                                      .ffn = 96});
  config.max_position_embeddings = 2048;
  for (const auto dtype : {DType::kBF16, DType::kF32}) {
    models::World world({});
    const models::ParallelState mesh(world, {}, "test");
    auto model = make_model(config, mesh, dtype);
    support::fill_parameters(model, 1);
    LLMEngine engine(model, {.max_num_seqs = 4, .max_num_batched_tokens = 300, .num_blocks = 60});
    const auto samples = support::run_load(
        engine, config.vocab_size,
        {.tokens = 12, .longest_prompt = 1100, .longest_output = 15, .system_prompts = 1});
    EXPECT_EQ(support::count_unequal(model, samples, 1), 0);
    // For sequences that continue behind others.
    auto longer = samples;
    for (auto& sample : longer) {
      const auto more = support::random_prompt(200, config.vocab_size, 7);
      sample.output.insert(sample.output.end(), more.begin(), more.end());
    }
    EXPECT_EQ(support::count_unequal(model, longer, 3), 0);
  }
}

// Blocks before the windows go to other sequences, and to other layers.
class Windows : public testing::TestWithParam<std::vector<bool>> {};

TEST_P(Windows, GiveTheirBlocksBackWithoutAnotherBit) {
  at::set_num_threads(1);
  auto config = support::tiny_config(
      {.family = "qwen3", .num_layers = 5, .head_dim = 16, .hidden = 64, .ffn = 96});
  config.max_position_embeddings = 1024;
  config.sliding_window = 70;
  config.window_attn_skip_freq = GetParam();
  const auto windows = kv_cache_groups(config).windows;
  models::World world({});
  const models::ParallelState mesh(world, {}, "test");
  for (const auto dtype : {DType::kBF16, DType::kF32}) {
    auto model = make_model(config, mesh, dtype);
    support::fill_parameters(model, 1);
    const support::Load load{
        .tokens = 400, .longest_prompt = 200, .longest_output = 500, .system_prompts = 0.7};
    const auto run = [&](EngineOptions options) {
      LLMEngine engine(model, options);
      const auto samples = support::run_load(engine, config.vocab_size, load);
      EXPECT_EQ(support::count_unequal(model, samples, 1), 0);
      EXPECT_EQ(engine.stats().num_free_blocks, engine.stats().num_blocks);
      return engine.stats();
    };
    const auto most = most_blocks(windows, 700, 64, KVCache::kBlockSize);
    const auto few = run({.max_num_seqs = 4, .max_num_batched_tokens = 64, .num_blocks = most + 2});
    EXPECT_GT(few.cached_tokens, 0);
    EXPECT_GT(few.num_preemptions, 0);
    run({.max_num_seqs = 4,
         .max_num_batched_tokens = 64,
         .num_blocks = 1000,
         .enable_prefix_caching = false});
  }
}

INSTANTIATE_TEST_SUITE_P(Layers,
                         Windows,
                         testing::Values(std::vector<bool>{},
                                         std::vector<bool>{true, false, true, false, true},
                                         std::vector<bool>{true, true, true, true, false}));

support::TinyModel tiny(const char* family) {
  return {.family = family, .head_dim = 16, .hidden = 64, .ffn = 96, .experts = 8};
}

models::ParallelConfig parallel(int tp, int ep = 1, int etp = 1) {
  return {.tensor_model_parallel_size = tp,
          .expert_model_parallel_size = ep,
          .expert_tensor_parallel_size = etp,
          .make_vocab_size_divisible_by = 8};
}

INSTANTIATE_TEST_SUITE_P(
    Models,
    BitwiseRollout,
    testing::Values(
        Case{"llama", tiny("llama")},
        Case{"llama_tp2", tiny("llama"), parallel(2), 2},
        Case{"llama_windowed", tiny("llama"), {}, 1, 70},
        Case{"qwen2_tp2", tiny("qwen2"), parallel(2), 2},
        Case{"qwen3", tiny("qwen3")},
        Case{"qwen3_fp32", tiny("qwen3"), {}, 1, {}, DType::kF32},
        Case{"qwen3_moe_tp2_ep2", tiny("qwen3_moe"), parallel(2, 2), 2},
        Case{"qwen3_moe_dp2_ep2", tiny("qwen3_moe"), parallel(1, 2), 2},
        Case{"qwen3_moe_tp2_dp2_ep4", tiny("qwen3_moe"), parallel(2, 4), 4},
        Case{"gpt_oss", tiny("mixtral"), {}, 1, 20, DType::kBF16, true},
        Case{"gpt_oss_fp32", tiny("mixtral"), {}, 1, 20, DType::kF32, true},
        Case{"gpt_oss_tp2_ep2", tiny("mixtral"), parallel(2, 2), 2, 20, DType::kBF16, true},
        Case{"gpt_oss_tp2_etp2", tiny("mixtral"), parallel(2, 1, 2), 2, 20, DType::kBF16, true},
        Case{.name = "hybrid", .model = tiny("qwen3"), .hybrid = true},
        Case{.name = "hybrid_fp32", .model = tiny("qwen3"), .dtype = DType::kF32, .hybrid = true},
        Case{.name = "hybrid_moe_tp2_ep2",
             .model = tiny("qwen3_moe"),
             .parallel = parallel(2, 2),
             .ranks = 2,
             .hybrid = true},
        Case{.name = "hybrid_moe_dp2_ep2",
             .model = tiny("qwen3_moe"),
             .parallel = parallel(1, 2),
             .ranks = 2,
             .hybrid = true},
        Case{.name = "gemma_tp2",
             .model = tiny("qwen3"),
             .parallel = parallel(2),
             .ranks = 2,
             .window = 20,
             .gemma = true},
        Case{.name = "gemma_fp32",
             .model = tiny("qwen3"),
             .window = 20,
             .dtype = DType::kF32,
             .gemma = true},
        Case{"deepseek_v3", tiny("deepseek_v3")},
        Case{"deepseek_v3_tp2_ep2", tiny("deepseek_v3"), parallel(2, 2), 2}),
    [](const auto& one) { return std::string(one.param.name); });

}  // namespace bitwise_test
}  // namespace ferry::rollout
