// Memory that is given back and taken again, weights that change in place, and a cache of latents.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "distckpt/base/error.h"
#include "models/distributed/world.h"
#include "rollout/step_memory.h"
#include "tests/support/expect.h"
#include "tests/support/memory_meter.h"
#include "tests/support/models/engine_load.h"
#include "tests/support/models/tiny_training.h"

namespace ferry::rollout {
namespace memory_test {

using models::Alignment;
using models::GPTModel;
using support::run_load;

// Resident bytes of this process, without what malloc keeps of other tests' memory.
std::int64_t resident() {
  malloc_trim(0);
  std::ifstream file("/proc/self/statm");
  std::int64_t pages = 0;
  file >> pages >> pages;
  return pages * 4096;
}

support::TinyModel tiny(const char* family) {
  return {.family = family, .head_dim = 16, .hidden = 64, .ffn = 96, .experts = 8};
}

models::TransformerConfig config_of(const char* family) {
  auto config = support::tiny_config(tiny(family));
  config.max_position_embeddings = 512;
  return config;
}

class Memory : public testing::Test {
 protected:
  // A second thread takes longer to wake than to compute with tiny tensors.
  static void SetUpTestSuite() { at::set_num_threads(1); }

  models::TransformerConfig config_ = config_of("qwen2");
  models::World world_{{}};
  models::ParallelState mesh_{world_, {}, "test"};
  GPTModel model_{config_, mesh_, models::stage_chunks(config_, {}, 0)[0], {}};
  const support::Load load_{.tokens = 100, .seed = 2};
};

std::vector<std::vector<std::int64_t>> tokens_of(const std::vector<support::Sample>& samples) {
  std::vector<std::vector<std::int64_t>> tokens;
  for (const auto& sample : samples) tokens.push_back(sample.output);
  return tokens;
}

TEST_F(Memory, AThousandSleepsLeakNothingAndChangeNothing) {
  support::fill_parameters(model_, 1);
  LLMEngine engine(model_, {.num_blocks = 500});
  const auto expected = tokens_of(run_load(engine, config_.vocab_size, load_));
  const auto awake = resident();
  std::int64_t early = 0;
  for (int cycle = 1; cycle <= 1000; ++cycle) {
    engine.sleep(1 + cycle % 2);
    ASSERT_TRUE(engine.is_sleeping());
    if (cycle == 1) {
      EXPECT_LT(resident(), awake - 400 * KVCache::bytes_per_block(model_));
      EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"sleeps"}, [&] { engine.step(); }));
    }
    engine.wake_up();
    if (cycle == 100) early = resident();
  }
  EXPECT_LT(resident(), early + (std::int64_t{2} << 20));
  EXPECT_FALSE(model_.parameters().not_finite().empty());  // until they are loaded
  support::fill_parameters(model_, 1);
  EXPECT_EQ(tokens_of(run_load(engine, config_.vocab_size, load_)), expected);
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"level 3"}, [&] { engine.sleep(3); }));
}

TEST_F(Memory, ARequestGoesOnAfterASleep) {
  support::fill_parameters(model_, 1);
  const auto run = [&](bool sleeps) {
    LLMEngine engine(model_, {.num_blocks = 50});
    engine.add_request("a", support::random_prompt(100, config_.vocab_size, 1),
                       {.seed = 1, .max_tokens = 20});
    std::vector<std::int64_t> tokens;
    for (int step = 0; engine.has_unfinished(); ++step) {
      if (sleeps && step == 7) {
        engine.sleep();
        engine.wake_up();
      }
      for (const auto& output : engine.step())
        for (const auto& part : output.outputs)
          for (const auto& token : part.tokens) tokens.push_back(token.token_id);
    }
    return tokens;
  };
  EXPECT_EQ(run(true), run(false));
}

TEST_F(Memory, NothingOfOldWeightsIsUsedWithNewOnes) {
  const auto prompt = support::random_prompt(200, config_.vocab_size, 1);
  const auto generate = [&](LLMEngine& engine) {
    engine.add_request("a", prompt, {.temperature = 0, .max_tokens = 10});
    std::vector<float> logprobs;
    while (engine.has_unfinished())
      for (const auto& output : engine.step())
        for (const auto& part : output.outputs)
          for (const auto& token : part.tokens) logprobs.push_back(token.logprob);
    return logprobs;
  };
  support::fill_parameters(model_, 1);
  LLMEngine engine(model_, {.num_blocks = 50});
  const auto old = generate(engine);
  support::fill_parameters(model_, 2);
  engine.reset_prefix_cache();
  LLMEngine fresh(model_, {.num_blocks = 50});
  const auto expected = generate(fresh);
  EXPECT_NE(expected, old);
  EXPECT_EQ(generate(engine), expected);
}

// Peak bytes of what `body` allocates.
std::int64_t peak(const std::function<void()>& body) {
  const auto meter = std::make_shared<support::MemoryMeter>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
  body();
  return meter->most;
}

// A cache is sized by what the largest steps take: no real one takes more, whatever the weights
// are.
TEST(StepMemory, IsNoLessThanRealStepsTake) {
  at::set_num_threads(1);
  for (const char* const family : {"qwen2", "qwen3_moe", "deepseek_v3"}) {
    for (const auto alignment : {Alignment::kFast, Alignment::kBitwise}) {
      SCOPED_TRACE(family + std::to_string(static_cast<int>(alignment)));
      models::World world({});
      const models::ParallelState mesh(world, {.make_vocab_size_divisible_by = 8}, "test");
      const auto config = config_of(family);
      GPTModel model(config, mesh, models::stage_chunks(config, {}, 0)[0],
                     {.alignment = alignment});
      const RunnerLimits limits{
          .max_num_seqs = 8, .max_num_batched_tokens = 40, .max_model_len = 512};
      const auto expected =
          peak([&] { take_largest_steps(model, limits); });  // weights of no meaning
      support::fill_parameters(model, 1);
      // Sequences of a block each: what decoding gathers of more is counted with the cache.
      const support::Load load{.tokens = 150, .longest_prompt = 40, .longest_output = 20};
      LLMEngine engine(model, {.max_num_seqs = 8, .max_num_batched_tokens = 40, .num_blocks = 20});
      (void)run_load(engine, config.vocab_size, load);  // kernels are chosen
      const auto found = peak([&] { run_load(engine, config.vocab_size, load); });
      EXPECT_LE(found, expected + 20 * gathered_bytes_per_block(model));
      EXPECT_GT(found, expected / 16);
    }
  }
}

// Prompts that begin alike and go on differently have the beginning gathered for each of them.
TEST(StepMemory, IsNoLessThanPromptsWithALongCommonBeginningTake) {
  at::set_num_threads(1);
  for (const char* const family : {"qwen2", "deepseek_v3"}) {
    for (const auto alignment : {Alignment::kFast, Alignment::kBitwise}) {
      SCOPED_TRACE(family + std::to_string(static_cast<int>(alignment)));
      models::World world({});
      const models::ParallelState mesh(world, {.make_vocab_size_divisible_by = 8}, "test");
      const auto config = config_of(family);
      GPTModel model(config, mesh, models::stage_chunks(config, {}, 0)[0],
                     {.alignment = alignment});
      const RunnerLimits limits{
          .max_num_seqs = 16, .max_num_batched_tokens = 80, .max_model_len = 512};
      const auto expected = peak([&] { take_largest_steps(model, limits); });
      support::fill_parameters(model, 1);
      const auto beginning = support::random_prompt(448, config.vocab_size, 1);
      std::map<std::string, std::int64_t> tokens;
      const auto answer = [&](LLMEngine& engine) {
        for (std::uint64_t i = 0; i < 16; ++i) {
          auto prompt = beginning;
          const auto end = support::random_prompt(5, config.vocab_size, 2 + i);
          prompt.insert(prompt.end(), end.begin(), end.end());
          engine.add_request(std::to_string(i), prompt, {.temperature = 0, .max_tokens = 1});
        }
        while (engine.has_unfinished())
          for (const auto& output : engine.step())
            tokens[output.request_id] = output.outputs.at(0).tokens.at(0).token_id;
      };
      LLMEngine engine(model, {.max_num_seqs = 16, .max_num_batched_tokens = 80, .num_blocks = 40});
      engine.add_request("first", beginning, {.max_tokens = 1});
      while (engine.has_unfinished()) engine.step();
      const auto steps = engine.stats().steps;
      EXPECT_LE(peak([&] { answer(engine); }), expected);
      EXPECT_EQ(engine.stats().steps, steps + 1);
      if (alignment == Alignment::kFast) continue;
      const auto shared = std::exchange(tokens, {});
      LLMEngine alone(model, {.max_num_seqs = 1, .num_blocks = 40, .enable_prefix_caching = false});
      answer(alone);
      EXPECT_EQ(shared, tokens);
    }
  }
}

// Without a kernel that reads blocks in place, keys of like lengths are gathered together: beside
// one long sequence short ones take no more than they need.
TEST(Products, GatherTheKeysOfLikeLengthsTogether) {
  at::set_num_threads(1);
  for (const char* const family : {"qwen2", "deepseek_v3"}) {
    SCOPED_TRACE(family);
    models::World world({});
    const models::ParallelState mesh(world, {.make_vocab_size_divisible_by = 8}, "test");
    const auto config = config_of(family);
    GPTModel model(config, mesh, models::stage_chunks(config, {}, 0)[0],
                   {.alignment = Alignment::kFast, .dtype = distckpt::DType::kF32});
    support::fill_parameters(model, 1);
    constexpr std::size_t kSequences = 32;
    LLMEngine engine(model, {.max_num_seqs = kSequences, .num_blocks = 60});
    std::map<std::string, support::Sample> samples;
    for (std::size_t i = 0; i < kSequences; ++i) {
      const auto name = std::to_string(i);
      auto& sample = samples[name];
      sample.prompt = support::random_prompt(i == 7 ? 480 : 20 + 4 * static_cast<std::int64_t>(i),
                                             config.vocab_size, i);
      engine.add_request(name, sample.prompt, {.max_tokens = 10});
    }
    const auto step = [&] {
      for (const auto& output : engine.step())
        for (const auto& token : output.outputs.at(0).tokens) {
          samples[output.request_id].output.push_back(token.token_id);
          samples[output.request_id].logprobs.push_back(token.logprob);
        }
    };
    step();  // the prompts
    const auto of_decoding = peak([&] {
      while (engine.has_unfinished()) step();
    });
    const auto of_block = KVCache::bytes_per_block(model) / config.num_layers;
    // Latents take less than the rest of a step.
    if (!config.multi_latent_attention) {
      EXPECT_LT(of_decoding, static_cast<std::int64_t>(kSequences) * 8 * of_block);
    }
    std::vector<support::Sample> all;
    for (auto& [name, sample] : samples) all.push_back(std::move(sample));
    EXPECT_LT(support::largest_difference(model, all), 2e-4);
  }
}

// In kFast a token's latent is all that is kept, and decoding computes over latents: the results
// are those of expanded keys but for roundings, which fp32 keeps small.
TEST(Latents, AreKeptInPlaceOfKeysAndValues) {
  at::set_num_threads(1);
  for (const char* const family : {"deepseek_v2", "deepseek_v3"}) {
    const auto config = config_of(family);
    for (const int tp : {1, 2}) {
      SCOPED_TRACE(family + std::to_string(tp));
      models::run_ranks(tp, {}, [&](models::World& world) {
        at::set_num_threads(1);
        const models::ParallelState mesh(world,
                                         {.tensor_model_parallel_size = tp,
                                          .expert_tensor_parallel_size = 1,
                                          .make_vocab_size_divisible_by = 8},
                                         "test");
        GPTModel model(config, mesh, models::stage_chunks(config, mesh.shape().parallel(), 0)[0],
                       {.alignment = Alignment::kFast, .dtype = distckpt::DType::kF32});
        support::fill_parameters(model, 1);
        EXPECT_EQ(KVCache::bytes_per_block(model),
                  config.num_layers * 64 * (config.kv_lora_rank + config.qk_pos_emb_head_dim) * 4);
        LLMEngine engine(model, {.max_num_seqs = 8, .max_num_batched_tokens = 40, .num_blocks = 5});
        const auto samples = run_load(engine, config.vocab_size, {.tokens = 150, .seed = 3});
        EXPECT_GT(engine.stats().num_preemptions, 0);
        EXPECT_LT(support::largest_difference(model, samples), 2e-4);
      });
    }
  }
}

}  // namespace memory_test
}  // namespace ferry::rollout
