#include "rollout/model_runner.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "tests/rollout/tiny_engine.h"
#include "tests/support/expect.h"
#include "tests/support/models/engine_load.h"

namespace ferry::rollout {
namespace model_runner_test {

class Runner : public TinyEngineTest {
 protected:
  // A greedy sequence whose blocks begin with `first_block`.
  static Sequence sequence(std::int64_t tokens, std::int32_t first_block, std::uint64_t seed) {
    const SamplingParams greedy{.temperature = 0};
    Sequence made{.params = std::make_shared<const SamplingParams>(greedy),
                  .ending_tokens = std::make_shared<const std::vector<std::int64_t>>(),
                  .token_ids = support::random_prompt(tokens, kVocabulary, seed),
                  .num_prompt_tokens = tokens};
    auto& table = made.block_tables.emplace_back();
    for (std::int64_t i = 0; i < KVCache::blocks_of(tokens + 1); ++i)
      table.push_back(first_block + static_cast<std::int32_t>(i));
    return made;
  }

  StepInFlight run(const std::vector<ScheduledSequence>& scheduled) {
    auto step = runner_.launch(scheduled, cache_, nullptr);
    ModelRunner::collect(step);
    return step;
  }

  // The token of the largest logit behind a prompt, by a forward pass without a cache.
  std::int64_t expected(const Sequence& one) {
    const at::NoGradGuard no_grad;
    const models::SequencePartition batch(models::pack({at::tensor(one.token_ids, at::kLong)}),
                                          mesh_);
    return model_.all_logits(model_.forward(batch), batch)[-1].argmax().item<std::int64_t>();
  }

  KVCache cache_{model_, 20};
  ModelRunner runner_{model_,
                      {.max_num_seqs = 4, .max_num_batched_tokens = 200, .max_model_len = 128}};
};

TEST_F(Runner, DrawsATokenBehindAPrompt) {
  auto one = sequence(20, 0, 1);
  const auto step = run({{&one, 20}});
  ASSERT_EQ(step.drawn.size(), 1);
  EXPECT_EQ(step.drawn[0].token.token_id, expected(one));
  EXPECT_EQ(step.drawn[0].position, 20);
}

TEST_F(Runner, APartOfAPromptDrawsNothing) {
  auto one = sequence(20, 0, 1);
  EXPECT_TRUE(run({{&one, 12}}).drawn.empty());
}

TEST_F(Runner, TheRestOfAPromptSeesItsBeginning) {
  auto one = sequence(20, 0, 1);
  run({{&one, 12}});
  one.num_computed_tokens = 12;
  EXPECT_EQ(run({{&one, 8}}).drawn.at(0).token.token_id, expected(one));
}

// They have more keys than are gathered at a time.
TEST_F(Runner, RestsOfManyPromptsSeeTheirBeginnings) {
  auto one = sequence(20, 0, 1), other = sequence(110, 5, 2), third = sequence(100, 10, 3);
  run({{&other, 95}, {&third, 90}});
  run({{&one, 19}});
  one.num_computed_tokens = 19;
  other.num_computed_tokens = 95;
  third.num_computed_tokens = 90;
  const auto step = run({{&one, 1}, {&other, 15}, {&third, 10}});
  ASSERT_EQ(step.drawn.size(), 3);
  EXPECT_EQ(step.drawn[0].token.token_id, expected(one));
  EXPECT_EQ(step.drawn[1].token.token_id, expected(other));
  EXPECT_EQ(step.drawn[2].token.token_id, expected(third));
}

TEST_F(Runner, SequencesDoNotSeeOneAnother) {
  auto one = sequence(20, 0, 1), other = sequence(70, 5, 2);
  const auto step = run({{&one, 20}, {&other, 70}});
  ASSERT_EQ(step.drawn.size(), 2);
  EXPECT_EQ(step.drawn[0].token.token_id, expected(one));
  EXPECT_EQ(step.drawn[1].token.token_id, expected(other));
}

TEST_F(Runner, ADecodingRowStandsBesideAPrompt) {
  auto one = sequence(20, 0, 1), other = sequence(30, 5, 2);
  run({{&one, 19}});
  one.num_computed_tokens = 19;
  const auto step = run({{&one, 1}, {&other, 30}});
  EXPECT_EQ(step.drawn.at(0).token.token_id, expected(one));
  EXPECT_EQ(step.drawn.at(1).token.token_id, expected(other));
}

TEST_F(Runner, TheEndOfAPromptMayBeACopy) {
  auto one = sequence(20, 0, 1), copy = sequence(20, 7, 1);
  run({{&one, 20}});
  copy.copied_from = {0};
  copy.num_computed_tokens = 19;
  EXPECT_EQ(run({{&copy, 1}}).drawn.at(0).token.token_id, expected(one));
}

TEST_F(Runner, AnUnknownTokenNeedsTheStepThatDrawsIt) {
  auto one = sequence(20, 0, 1);
  one.num_computed_tokens = 20;
  one.token_ids.push_back(Sequence::kUnknown);
  EXPECT_TRUE(support::fails(ErrorKind::kBug, {"a token of no step is not known"}, [&] {
    run({{&one, 1}});
  }));
}

TEST_F(Runner, AStepWithoutSequencesDrawsNothing) {
  EXPECT_TRUE(run({}).drawn.empty());
}

TEST(DecodeGraphs, AnErrorWhileAStepIsCapturedLeavesNoGraph) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  const auto numbers = at::arange(4, at::TensorOptions(at::kCUDA));
  int calls = 0;
  DecodeGraphs graphs([&](std::int64_t) {
    const DecodedRows rows{.hidden = numbers + 1};
    if (++calls == 2) throw Error(ErrorKind::kDevice, "the second call");
    return rows;
  });
  EXPECT_TRUE(support::fails(ErrorKind::kDevice, {"the second call"}, [&] { graphs.replay(4); }));
  for (int i = 0; i < 3; ++i) {  // as it is, captured; then the graph, of other numbers
    EXPECT_TRUE(at::equal(graphs.replay(4).hidden, numbers + 1)) << i;
    numbers.mul_(2);
  }
  EXPECT_EQ(calls, 4);
}

}  // namespace model_runner_test
}  // namespace ferry::rollout
