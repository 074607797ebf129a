// Outputs of requests: beside one another, refused ones, ones that end early.
#include "rollout/llm_engine.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "models/distributed/world.h"
#include "tests/support/expect.h"
#include "tests/support/models/engine_load.h"
#include "tests/support/models/tiny_training.h"

namespace ferry::rollout {
namespace llm_engine_test {

using distckpt::DType;
using models::Alignment;
using models::GPTModel;
using support::random_prompt;

constexpr std::int64_t kVocabulary = 50;

class Engine : public testing::Test {
 protected:
  // A second thread takes longer to wake than to compute with tiny tensors.
  static void SetUpTestSuite() { at::set_num_threads(1); }

  explicit Engine(Alignment alignment = Alignment::kBitwise)
      : world_({}),
        mesh_(world_, {}, "test"),
        config_(
            support::tiny_config({.head_dim = 16, .hidden = 64, .ffn = 96, .vocab = kVocabulary})),
        model_(config_, mesh_, models::stage_chunks(config_, {}, 0)[0], {.alignment = alignment}) {
    support::fill_parameters(model_, 1);
  }

  LLMEngine make(EngineOptions options) { return LLMEngine(model_, std::move(options)); }

  models::World world_;
  models::ParallelState mesh_;
  models::TransformerConfig config_;  // of 128 positions
  GPTModel model_;
};

struct Answer {
  std::map<std::int64_t, std::vector<std::int64_t>> tokens{};  // of each sample
  std::map<std::int64_t, FinishReason> reasons{};
  std::optional<std::int64_t> stop_reason{};
  std::string error{};
  int finished = 0;
};

std::map<std::string, Answer> run_all(LLMEngine& engine) {
  std::map<std::string, Answer> answers;
  while (engine.has_unfinished()) {
    for (const auto& output : engine.step()) {
      auto& answer = answers[output.request_id];
      if (output.error) answer.error = output.error->what();
      answer.finished += output.finished ? 1 : 0;
      for (const auto& part : output.outputs) {
        for (const auto& token : part.tokens) answer.tokens[part.index].push_back(token.token_id);
        answer.reasons[part.index] = part.finish_reason;
        if (part.stop_reason) answer.stop_reason = part.stop_reason;
      }
    }
  }
  for (const auto& [id, answer] : answers) EXPECT_EQ(answer.finished, 1) << id;
  return answers;
}

TEST_F(Engine, GreedyTokensAreThoseOfRepeatedForwards) {
  auto engine = make({.max_num_seqs = 4, .max_num_batched_tokens = 16, .num_blocks = 4});
  const auto prompt = random_prompt(30, kVocabulary, 1);
  engine.add_request("a", prompt, {.temperature = 0, .max_tokens = 20});
  const auto tokens = run_all(engine).at("a").tokens.at(0);
  const at::NoGradGuard no_grad;
  auto sequence = prompt;
  for (int i = 0; i < 20; ++i) {
    const models::SequencePartition batch(models::pack({at::tensor(sequence, at::kLong)}), mesh_);
    const auto logits = model_.all_logits(model_.forward(batch), batch);
    sequence.push_back(logits[-1].argmax().item<std::int64_t>());
  }
  EXPECT_EQ(tokens, std::vector(sequence.begin() + 30, sequence.end()));
}

TEST_F(Engine, EndsWhereItIsTold) {
  auto engine = make({.num_blocks = 20, .eos_token_ids = {}});
  const auto prompt = random_prompt(10, kVocabulary, 2);
  engine.add_request("plain", prompt, {.temperature = 0, .max_tokens = 30});
  const auto plain = run_all(engine).at("plain");
  ASSERT_EQ(plain.tokens.at(0).size(), 30U);
  EXPECT_EQ(plain.reasons.at(0), FinishReason::kLength);
  const auto& all = plain.tokens.at(0);
  const auto tenth = all[9];
  const auto first = static_cast<std::size_t>(std::ranges::find(all, tenth) - all.begin()) + 1;

  auto other = make({.num_blocks = 20, .eos_token_ids = {tenth}});
  const SamplingParams greedy{.temperature = 0, .max_tokens = 30};
  auto stop = greedy;
  stop.stop_token_ids = {all[4]};
  auto on = greedy;
  on.ignore_eos = true;
  auto late = greedy;
  late.min_tokens = 25;
  other.add_request("eos", prompt, greedy);
  other.add_request("stop", prompt, stop);
  other.add_request("on", prompt, on);
  other.add_request("late", prompt, late);
  other.add_request("context", random_prompt(120, kVocabulary, 3), on);
  const auto answers = run_all(other);
  EXPECT_EQ(answers.at("eos").tokens.at(0).size(), first);
  EXPECT_EQ(answers.at("eos").reasons.at(0), FinishReason::kStop);
  EXPECT_EQ(answers.at("eos").stop_reason, tenth);
  EXPECT_LE(answers.at("stop").tokens.at(0).size(), 5U);
  EXPECT_EQ(answers.at("stop").tokens.at(0).back(), *answers.at("stop").stop_reason);
  EXPECT_EQ(answers.at("on").tokens.at(0), all);
  EXPECT_GE(answers.at("late").tokens.at(0).size(), 25U);
  EXPECT_EQ(answers.at("context").tokens.at(0).size(), 8U);  // the model knows 128 positions
  EXPECT_EQ(answers.at("context").reasons.at(0), FinishReason::kLength);
}

TEST_F(Engine, AWrongRequestHasItsAnswerWhileOthersGoOn) {
  auto engine = make({.num_blocks = 1});
  engine.add_request("good", random_prompt(5, kVocabulary, 4), {.max_tokens = 10});
  engine.add_request("empty", {}, {});
  engine.add_request("long", random_prompt(128, kVocabulary, 4), {});
  engine.add_request("negative", {3, -1}, {});
  engine.add_request("unknown", {3, kVocabulary}, {});
  engine.add_request("large", random_prompt(60, kVocabulary, 4), {.max_tokens = 30});
  engine.add_request("ending", {3}, {.stop_token_ids = {4, kVocabulary}});
  engine.add_request("contradictory", {3}, {.max_tokens = 2, .min_tokens = 3});
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"good", "under way"},
                             [&] { engine.add_request("good", {1}, {}); }));
  const auto answers = run_all(engine);
  EXPECT_EQ(answers.at("good").tokens.at(0).size(), 10U);
  EXPECT_EQ(answers.at("empty").error, "the prompt is empty");
  EXPECT_EQ(answers.at("long").error,
            "the prompt has 128 tokens: with one more it is longer than max_model_len, 128");
  EXPECT_EQ(answers.at("negative").error, "token 1 of the prompt is -1: the vocabulary has 50");
  EXPECT_EQ(answers.at("unknown").error, "token 1 of the prompt is 50: the vocabulary has 50");
  EXPECT_EQ(answers.at("large").error,
            "a prompt of 60 tokens and 30 more can never fit the KV cache, of 64 tokens");
  EXPECT_EQ(answers.at("ending").error, "stop_token_ids: 50 is no token: the vocabulary has 50");
  EXPECT_EQ(answers.at("contradictory").error, "min_tokens: 3 are more than max_tokens, 2");
}

TEST_F(Engine, SaysHowLongASequenceTheCacheHolds) {
  auto engine = make({.num_blocks = 1});
  EXPECT_EQ(engine.longest_sequence(0), 0);
  EXPECT_EQ(engine.longest_sequence(1), 64);
  EXPECT_EQ(engine.longest_sequence(2), 128);
  EXPECT_EQ(engine.longest_sequence(9), 128);
  engine.add_request("long", random_prompt(40, kVocabulary, 4), {.max_tokens = 24});
  EXPECT_EQ(run_all(engine).at("long").tokens.at(0).size(), 24U);
}

TEST_F(Engine, AnAbortedRequestIsGoneAndTheOthersDoNotNotice) {
  const auto run = [&](bool with_other) {
    auto engine = make({.max_num_batched_tokens = 256, .num_blocks = 20});
    engine.add_request("a", random_prompt(20, kVocabulary, 5), {.seed = 7, .max_tokens = 20});
    if (with_other) {
      engine.add_request("b", random_prompt(90, kVocabulary, 6), {.n = 3, .max_tokens = 20});
      engine.step();
      engine.step();
      EXPECT_TRUE(engine.abort("b"));
      EXPECT_FALSE(engine.abort("b"));
    }
    return run_all(engine);
  };
  const auto alone = run(false);
  const auto beside = run(true);
  ASSERT_EQ(beside.size(), 1U);
  const auto tail =
      std::vector(alone.at("a").tokens.at(0).begin() + 2, alone.at("a").tokens.at(0).end());
  EXPECT_EQ(beside.at("a").tokens.at(0), tail);
}

TEST_F(Engine, SamplesOfAPromptShareItsBlocksAndDifferByTheirDraws) {
  auto engine = make({.num_blocks = 20});
  const auto prompt = random_prompt(100, kVocabulary, 8);
  engine.add_request("a", prompt, {.n = 8, .seed = 3, .max_tokens = 10});
  engine.step();
  // One full block for all, and one for the end of each, of which the last token alone is computed.
  EXPECT_EQ(engine.stats().num_free_blocks, 20 - 1 - 8);
  EXPECT_EQ(engine.stats().cached_tokens, 7 * 99);
  EXPECT_EQ(engine.stats().prompt_tokens, 100 + 7);
  const auto answers = run_all(engine);
  EXPECT_EQ(answers.at("a").tokens.size(), 8U);
  EXPECT_NE(answers.at("a").tokens.at(0), answers.at("a").tokens.at(1));
  auto again = make({.num_blocks = 20});
  again.add_request("b", prompt, {.n = 8, .seed = 3, .max_tokens = 10});
  again.step();
  EXPECT_EQ(run_all(again).at("b").tokens,
            answers.at("a").tokens);  // the seed decides, not the name
}

TEST_F(Engine, GivesTheLikeliestTokensToThoseWhoAsk) {
  auto engine = make({.num_blocks = 20});
  engine.add_request("three", random_prompt(5, kVocabulary, 9),
                     {.temperature = 0, .max_tokens = 1, .logprobs = 3});
  engine.add_request("none", random_prompt(5, kVocabulary, 9), {.temperature = 0, .max_tokens = 1});
  for (const auto& output : engine.step()) {
    const auto& token = output.outputs.at(0).tokens.at(0);
    ASSERT_EQ(token.top.size(), output.request_id == "three" ? 3U : 0U);
    if (token.top.empty()) continue;
    EXPECT_EQ(token.top[0].token_id, token.token_id);
    EXPECT_EQ(token.top[0].logprob, token.logprob);
    EXPECT_GE(token.top[0].logprob, token.top[1].logprob);
  }
}

}  // namespace llm_engine_test
}  // namespace ferry::rollout
