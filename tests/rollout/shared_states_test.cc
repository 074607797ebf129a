// A hybrid model's engine with a prefix cache, against one without: samples of a prompt, and
// prompts that begin alike, have the same tokens and log-probabilities, in every bit, and fewer
// tokens are computed.
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "models/distributed/world.h"
#include "tests/support/models/engine_load.h"
#include "tests/support/models/tiny_training.h"

namespace ferry::rollout {
namespace shared_states_test {

using distckpt::DType;
using models::Alignment;
using models::GPTModel;
using support::random_prompt;

constexpr std::int64_t kVocabulary = 50;

struct Request {
  std::string id{};
  std::vector<std::int64_t> prompt{};
  SamplingParams params{};
};

// Tokens of a sample, and the bits of both log-probabilities of each.
struct Drawn {
  std::vector<std::int64_t> tokens{};
  std::vector<std::uint32_t> logprobs{};
  bool operator==(const Drawn&) const = default;
};
using Answers = std::map<std::pair<std::string, std::int64_t>, Drawn>;

// Every step adds the next `arrivals` requests. `between` is called before each step.
Answers run(LLMEngine& engine,
            const std::vector<Request>& requests,
            std::size_t arrivals = 1000,
            const std::function<void(int step)>& between = {}) {
  Answers answers;
  std::size_t added = 0;
  for (int step = 0; engine.has_unfinished() || added < requests.size(); ++step) {
    for (std::size_t i = 0; i < arrivals && added < requests.size(); ++i, ++added)
      engine.add_request(requests[added].id, requests[added].prompt, requests[added].params);
    if (between) between(step);
    for (const auto& output : engine.step()) {
      if (output.error) ADD_FAILURE() << output.request_id << ": " << output.error->what();
      for (const auto& part : output.outputs) {
        auto& drawn = answers[{output.request_id, part.index}];
        for (const auto& token : part.tokens) {
          drawn.tokens.push_back(token.token_id);
          drawn.logprobs.push_back(std::bit_cast<std::uint32_t>(token.logprob));
          drawn.logprobs.push_back(std::bit_cast<std::uint32_t>(token.processed_logprob));
        }
      }
    }
  }
  EXPECT_EQ(engine.stats().num_free_blocks, engine.stats().num_blocks);
  return answers;
}

// The first sample that differs; empty if none does.
std::string difference(const Answers& got, const Answers& expected) {
  if (got.size() != expected.size())
    return fmt::format("{} samples in place of {}", got.size(), expected.size());
  for (const auto& [sample, drawn] : expected) {
    const auto found = got.find(sample);
    if (found == got.end() || found->second != drawn)
      return fmt::format("sample {} of {}", sample.second, sample.first);
  }
  return {};
}

std::vector<std::int64_t> joined(std::vector<std::int64_t> a, const std::vector<std::int64_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

Request group(const std::string& id, std::vector<std::int64_t> prompt, std::int64_t n = 4) {
  return {.id = id,
          .prompt = std::move(prompt),
          .params = {.n = n, .temperature = 0.9, .ignore_eos = true, .max_tokens = 12}};
}

struct Case {
  const char* name;
  Alignment alignment = Alignment::kBitwise;
  DType dtype = DType::kBF16;
};

void PrintTo(const Case& one, std::ostream* out) {
  *out << one.name;
}

class SharedStates : public testing::TestWithParam<Case> {
 protected:
  // A second thread takes longer to wake than to compute with tiny tensors.
  static void SetUpTestSuite() { at::set_num_threads(1); }

  SharedStates() { support::fill_parameters(model_, 1); }

  // In kFast and fp32 MKL's products of a row may depend on the other rows of the step: engines
  // without shared states differ then, too. In bf16 they do not.
  void SetUp() override {
    if (GetParam().alignment == Alignment::kBitwise) return;
    const std::vector<Request> requests{group("a", random_prompt(65, kVocabulary, 1))};
    auto one = options(false);
    one.max_num_seqs = 1;
    LLMEngine together(model_, options(false));
    LLMEngine one_by_one(model_, one);
    const auto found = difference(run(together, requests), run(one_by_one, requests));
    if (GetParam().dtype == DType::kF32 && !found.empty())
      GTEST_SKIP() << "MKL's products in fp32 depend on the number of rows here: " << found;
    ASSERT_EQ(found, "") << "a row depends on others in bf16";
  }

  static models::TransformerConfig make_config() {
    auto config = support::tiny_config({.family = "qwen3",
                                        .num_layers = 3,
                                        .head_dim = 16,
                                        .hidden = 64,
                                        .ffn = 96,
                                        .vocab = kVocabulary});
    support::make_hybrid(config);
    config.max_position_embeddings = 1024;
    return config;
  }

  static EngineOptions options(bool shares, std::int64_t max_num_batched_tokens = 8192) {
    return {.max_num_seqs = 32,
            .max_num_batched_tokens = max_num_batched_tokens,
            .num_blocks = 200,
            .enable_prefix_caching = shares};
  }

  models::TransformerConfig config_ = make_config();
  models::World world_{{}};
  models::ParallelState mesh_{world_, {}, "test"};
  GPTModel model_{config_,
                  mesh_,
                  models::stage_chunks(config_, {}, 0)[0],
                  {.alignment = GetParam().alignment, .dtype = GetParam().dtype}};
};

TEST_P(SharedStates, SamplesOfAPromptComputeItsBlocksOnce) {
  for (const std::int64_t length : {1, 63, 64, 65, 66, 128, 129, 200}) {
    SCOPED_TRACE(length);
    const std::vector<Request> requests{group("a", random_prompt(length, kVocabulary, 1))};
    LLMEngine alone(model_, options(false));
    LLMEngine shared(model_, options(true));
    EXPECT_EQ(difference(run(shared, requests), run(alone, requests)), "");
    const auto of_blocks = (length - 1) / 64 * 64;
    EXPECT_EQ(alone.stats().prompt_tokens, 4 * length);
    EXPECT_EQ(alone.stats().cached_tokens, 0);
    EXPECT_EQ(shared.stats().prompt_tokens, 4 * length - 3 * of_blocks);
    EXPECT_EQ(shared.stats().cached_tokens, 3 * of_blocks);
  }
}

// Prompts that begin alike, in any order, whole and in chunks.
TEST_P(SharedStates, GroupsThatBeginAlikeHaveTheBitsOfOthers) {
  std::vector<Request> requests;
  for (const std::int64_t common : {63, 64, 65, 128, 130}) {
    for (const std::int64_t more : {1, 64, 100}) {
      const auto seed = static_cast<std::uint64_t>(100 * common + more);
      requests.push_back(group(std::to_string(seed),
                               joined(random_prompt(common, kVocabulary, 1 + common % 3),
                                      random_prompt(more, kVocabulary, seed)),
                               1 + (common + more) % 3));
    }
  }
  LLMEngine alone(model_, options(false));
  const auto expected = run(alone, requests);
  const std::vector<std::pair<std::int64_t, std::size_t>> loads{
      {100, 1}, {100, 1000}, {300, 3}, {8192, 1}, {8192, 1000}};
  for (const auto& [most, arrivals] : loads) {
    SCOPED_TRACE(fmt::format("{} tokens, {} requests in a step", most, arrivals));
    LLMEngine shared(model_, options(true, most));
    EXPECT_EQ(difference(run(shared, requests, arrivals), expected), "");
    EXPECT_LT(shared.stats().prompt_tokens, alone.stats().prompt_tokens * 2 / 3);
    EXPECT_EQ(shared.stats().prompt_tokens + shared.stats().cached_tokens,
              alone.stats().prompt_tokens);
  }
}

TEST_P(SharedStates, ALaterPromptBeginsWithThoseOfAnEarlierOne) {
  const auto prompt = random_prompt(150, kVocabulary, 1);
  const auto longer = joined(prompt, random_prompt(80, kVocabulary, 2));
  LLMEngine shared(model_, options(true));
  LLMEngine alone(model_, options(false));
  run(shared, {group("a", prompt, 1)});
  EXPECT_EQ(shared.stats().cached_tokens, 0);
  EXPECT_EQ(difference(run(shared, {group("b", prompt, 1)}), run(alone, {group("b", prompt, 1)})),
            "");
  EXPECT_EQ(shared.stats().cached_tokens, 128);
  EXPECT_EQ(difference(run(shared, {group("c", longer, 1)}), run(alone, {group("c", longer, 1)})),
            "");
  EXPECT_EQ(shared.stats().cached_tokens, 256);
}

// 32 sequences have slots for the states of four prompts.
TEST_P(SharedStates, OfAFewPromptsAreKept) {
  LLMEngine shared(model_, options(true));
  LLMEngine alone(model_, options(false));
  const auto of_prompt = [&](std::uint64_t seed) {
    const std::vector<Request> requests{
        group(std::to_string(seed), random_prompt(70, kVocabulary, seed), 1)};
    const auto before = shared.stats().cached_tokens;
    EXPECT_EQ(difference(run(shared, requests), run(alone, requests)), "");
    return shared.stats().cached_tokens - before;
  };
  for (std::uint64_t seed = 1; seed <= 5; ++seed) EXPECT_EQ(of_prompt(seed), 0);
  for (std::uint64_t seed = 5; seed > 1; --seed) EXPECT_EQ(of_prompt(seed), 64);
  EXPECT_EQ(of_prompt(1), 0);
  EXPECT_EQ(of_prompt(2), 64);
  EXPECT_EQ(of_prompt(5), 0) << "was unused longest";
}

TEST_P(SharedStates, OfOldWeightsAreNotUsedWithNewOnes) {
  const std::vector<Request> requests{group("a", random_prompt(150, kVocabulary, 1))};
  LLMEngine shared(model_, options(true));
  const auto old = run(shared, requests);
  support::fill_parameters(model_, 2);
  shared.reset_prefix_cache();
  LLMEngine alone(model_, options(false));
  const auto expected = run(alone, requests);
  EXPECT_NE(difference(expected, old), "");
  EXPECT_EQ(difference(run(shared, requests), expected), "");
  shared.sleep();
  shared.wake_up();
  EXPECT_EQ(difference(run(shared, requests), expected), "");
  EXPECT_EQ(shared.stats().cached_tokens, 3 * 3 * 128);
}

// The sample whose states the others wait for ends, or all sleep, in any step.
TEST_P(SharedStates, WhateverHappensMeanwhileTheOthersHaveTheirBits) {
  const std::vector<Request> requests{group("a", random_prompt(330, kVocabulary, 1)),
                                      group("b", random_prompt(200, kVocabulary, 2))};
  LLMEngine alone(model_, options(false));
  const auto expected = run(alone, requests);
  for (const int when : {1, 2, 4, 7}) {
    SCOPED_TRACE(when);
    LLMEngine aborts(model_, options(true, 100));
    const auto answers = run(aborts, requests, 1000, [&](int step) {
      if (step == when) aborts.abort("a", 0);
    });
    for (const auto& [sample, drawn] : answers) {
      if (sample != std::pair<std::string, std::int64_t>("a", 0)) {
        EXPECT_EQ(drawn, expected.at(sample)) << sample.first << sample.second;
      }
    }
    EXPECT_GE(answers.size(), 7U);
    LLMEngine sleeps(model_, options(true, 100));
    const auto slept = run(sleeps, requests, 1000, [&](int step) {
      if (step != when) return;
      sleeps.sleep();
      sleeps.wake_up();
    });
    // In kFast tokens that were decoded are computed again as those of prompts are.
    if (GetParam().alignment == Alignment::kBitwise) {
      EXPECT_EQ(difference(slept, expected), "");
    }
    EXPECT_EQ(slept.size(), expected.size());
  }
}

// Without chunked prefill a prompt has no steps that could end where states are kept.
TEST_P(SharedStates, AreNotKeptWithoutChunkedPrefill) {
  auto whole = options(true);
  whole.enable_chunked_prefill = false;
  LLMEngine engine(model_, whole);
  EXPECT_FALSE(engine.options().enable_prefix_caching);
  const std::vector<Request> requests{group("a", random_prompt(150, kVocabulary, 1))};
  LLMEngine alone(model_, options(false));
  EXPECT_EQ(difference(run(engine, requests), run(alone, requests)), "");
}

INSTANTIATE_TEST_SUITE_P(Models,
                         SharedStates,
                         testing::Values(Case{"bitwise"},
                                         Case{"bitwise_fp32", Alignment::kBitwise, DType::kF32},
                                         Case{"fast", Alignment::kFast},
                                         Case{"fast_fp32", Alignment::kFast, DType::kF32}),
                         [](const auto& one) { return std::string(one.param.name); });

}  // namespace shared_states_test
}  // namespace ferry::rollout
