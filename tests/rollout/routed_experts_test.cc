// Routes of tokens: where the blocks of the cache keep them, and whom they are handed out to.
#include "rollout/routed_experts.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <numeric>

#include "models/distributed/world.h"
#include "rollout/output_processor.h"
#include "tests/support/expect.h"
#include "tests/support/models/engine_load.h"
#include "tests/support/models/tiny_training.h"

namespace ferry::rollout {
namespace routed_experts_test {

using support::random_prompt;
using support::Sample;

class Routes : public testing::Test {
 protected:
  // A second thread takes longer to wake than to compute with tiny tensors.
  static void SetUpTestSuite() { at::set_num_threads(1); }

  void make_model(int experts, const char* family = "qwen3_moe") {
    config_ = support::tiny_config(
        {.family = family, .head_dim = 16, .hidden = 64, .ffn = 96, .experts = experts});
    config_.max_position_embeddings = 512;
    if (experts > 0) config_.moe_router_topk = 2;
    model_.emplace(config_, mesh_, models::stage_chunks(config_, {}, 0)[0],
                   models::ModelOptions{.alignment = models::Alignment::kBitwise});
    support::fill_parameters(*model_, 1);
  }

  // The finished samples of requests.
  std::vector<Sample> run(LLMEngine& engine,
                          const std::vector<std::vector<std::int64_t>>& prompts,
                          const SamplingParams& params) {
    std::vector<Sample> samples;
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      engine.add_request(std::to_string(i), prompts[i], params);
      samples.insert(samples.end(), static_cast<std::size_t>(params.n),
                     Sample{.prompt = prompts[i]});
    }
    while (engine.has_unfinished()) {
      for (const auto& output : engine.step()) {
        for (const auto& part : output.outputs) {
          auto& sample =
              samples[std::stoul(output.request_id) * static_cast<std::size_t>(params.n) +
                      static_cast<std::size_t>(part.index)];
          sample.output.push_back(part.tokens.at(0).token_id);
          sample.routed_experts.insert(sample.routed_experts.end(), part.routed_experts.begin(),
                                       part.routed_experts.end());
        }
      }
    }
    return samples;
  }

  models::World world_{{}};
  models::ParallelState mesh_{world_, {}, "test"};
  models::TransformerConfig config_;
  std::optional<models::GPTModel> model_;
};

TEST_F(Routes, LieInTheSlotsOfBlocks) {
  make_model(300);
  RoutedExperts routes(*model_, /*num_blocks=*/3, /*block_size=*/4);
  const auto of_tokens = [&](std::int64_t first, std::int64_t count) {
    const auto numbers = config_.num_layers * 2;
    return at::arange(first * numbers, (first + count) * numbers)
        .to(at::kShort)
        .view({count, numbers})
        .view(at::kByte);
  };
  const std::vector<std::int64_t> before{8, 9, 10, 11, 0}, behind{1, 2};  // blocks 2, 0
  routes.store(before, of_tokens(0, 5));
  routes.store({}, of_tokens(0, 0));
  routes.store(behind, of_tokens(5, 2));
  const std::vector<std::int32_t> table{2, 0};
  for (const auto& [begin, end] : {std::pair{0, 7}, {3, 5}, {4, 4}, {6, 7}}) {
    const auto read = routed_experts_tensor(routes.read(table, begin, end), config_);
    EXPECT_EQ(read.sizes(), (std::vector<std::int64_t>{end - begin, config_.num_layers, 2}));
    EXPECT_EQ(read.scalar_type(), at::kShort);
    EXPECT_TRUE(at::equal(read.flatten(1).view(at::kByte), of_tokens(begin, end - begin)));
  }
}

// Only the first of the samples has computed more of their prompt than its last token.
TEST_F(Routes, AreThoseOfWhoeverComputedTheBlock) {
  for (const int experts : {8, 256, 300}) {
    make_model(experts);
    LLMEngine engine(*model_, {.max_num_seqs = 8,
                               .max_num_batched_tokens = 48,
                               .num_blocks = 40,
                               .enable_return_routed_experts = true});
    const auto samples = run(engine, {random_prompt(200, config_.vocab_size, 1)},
                             {.n = 3, .ignore_eos = true, .max_tokens = 10});
    EXPECT_EQ(engine.stats().cached_tokens, 2 * 199);
    EXPECT_EQ(support::count_other_routes(*model_, samples), 0) << experts;
    EXPECT_EQ(routed_experts_tensor(samples[2].routed_experts, config_).sizes(),
              (std::vector<std::int64_t>{209, config_.num_layers, 2}));
    const auto again = run(engine, {samples[1].tokens()}, {.max_tokens = 1});
    EXPECT_GT(engine.stats().cached_tokens, 2 * 199 + 128) << "of answers as well";
    EXPECT_EQ(support::count_other_routes(*model_, again), 0) << experts;
  }
}

TEST_F(Routes, AreHandedOutOnceThoughTheyAreComputedAgain) {
  make_model(8);
  LLMEngine engine(*model_, {.max_num_seqs = 4,
                             .max_num_batched_tokens = 40,
                             .num_blocks = 5,
                             .enable_return_routed_experts = true});
  const auto samples =
      run(engine,
          {random_prompt(70, config_.vocab_size, 1), random_prompt(60, config_.vocab_size, 2),
           random_prompt(62, config_.vocab_size, 3)},
          {.ignore_eos = true, .max_tokens = 80});
  EXPECT_GT(engine.stats().num_preemptions, 0);
  EXPECT_EQ(support::count_other_routes(*model_, samples), 0);
}

TEST_F(Routes, AreThereAsFarAsAnAnswerHasCome) {
  make_model(8);
  LLMEngine engine(*model_, {.num_blocks = 10, .enable_return_routed_experts = true});
  OutputProcessor processor(engine, nullptr);
  const auto prompt = random_prompt(70, config_.vocab_size, 1);
  processor.add_request("a", prompt, {.ignore_eos = true, .max_tokens = 20});
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(processor.step().empty());
  const auto completion = processor.abort_all().at(0).completions.at(0);
  Sample sample{.prompt = prompt, .routed_experts = completion.routed_experts};
  for (const auto& token : completion.tokens) sample.output.push_back(token.token_id);
  EXPECT_EQ(sample.output.size(), 5U);
  EXPECT_EQ(support::count_other_routes(*model_, {sample}), 0);
}

TEST_F(Routes, AreThereForThoseWhoAskForThem) {
  make_model(8);
  LLMEngine engine(*model_, {.num_blocks = 10});
  EXPECT_TRUE(run(engine, {{1, 2, 3}}, {.max_tokens = 3}).at(0).routed_experts.empty());
  make_model(0, "qwen3");
  EXPECT_TRUE(support::fails(
      ErrorKind::kUsage, {"enable_return_routed_experts", "no experts"},
      [&] { LLMEngine(*model_, {.num_blocks = 10, .enable_return_routed_experts = true}); }));
}

}  // namespace routed_experts_test
}  // namespace ferry::rollout
