#include "rollout/schedule/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <list>
#include <numeric>
#include <string>

#include "distckpt/base/error.h"

namespace ferry::rollout {
namespace scheduler_test {

// A scheduler over blocks of four tokens whose steps are computed by nobody: what they would
// compute is counted, and every sequence that is computed to its end gets a token.
class Steps {
 public:
  Steps(SchedulerOptions options, std::int64_t num_blocks)
      : blocks(num_blocks, 4, true), scheduler(options, blocks) {}

  Sequence& add(const std::string& name, std::int64_t size) {
    auto& sequence = sequences.emplace_back(Sequence{.request_id = name});
    for (std::int64_t i = 0; i < size; ++i) sequence.token_ids.push_back(next_token_++);
    sequence.num_prompt_tokens = size;
    scheduler.add(sequence);
    return sequence;
  }

  // "a3 b1": the sequences of a step, with the number of their new tokens.
  std::string step() {
    std::string text;
    for (const auto& [sequence, tokens] : scheduler.schedule()) {
      if (!text.empty()) text += ' ';
      text += sequence->request_id + std::to_string(tokens);
      sequence->num_computed_tokens += tokens;
      if (sequence->num_computed_tokens == sequence->size())
        sequence->token_ids.push_back(next_token_++);
    }
    return text;
  }

  std::list<Sequence> sequences;
  BlockManager blocks;
  Scheduler scheduler;

 private:
  std::int64_t next_token_ = 0;
};

TEST(Scheduler, MixesChunksOfPromptsWithDecoding) {
  Steps steps({.max_num_seqs = 4, .max_num_batched_tokens = 8}, 100);
  steps.add("a", 3);
  steps.add("b", 12);
  steps.add("c", 2);
  EXPECT_EQ(steps.step(), "a3 b5");
  EXPECT_EQ(steps.step(), "a1 b7");
  EXPECT_EQ(steps.step(), "a1 b1 c2");
  EXPECT_EQ(steps.step(), "a1 b1 c1");
}

TEST(Scheduler, RunsNoMoreSequencesThanItMay) {
  Steps steps({.max_num_seqs = 2, .max_num_batched_tokens = 100}, 100);
  auto& a = steps.add("a", 3);
  steps.add("b", 3);
  steps.add("c", 3);
  EXPECT_EQ(steps.step(), "a3 b3");
  EXPECT_EQ(steps.step(), "a1 b1");
  steps.scheduler.remove(a);
  EXPECT_EQ(steps.step(), "b1 c3");
  EXPECT_THROW(Steps({.max_num_seqs = 9, .max_num_batched_tokens = 8}, 100), Error);
}

TEST(Scheduler, WithoutChunksAPromptWaitsForItsTurn) {
  Steps steps({.max_num_seqs = 4, .max_num_batched_tokens = 8, .enable_chunked_prefill = false},
              100);
  steps.add("a", 5);
  steps.add("b", 4);
  EXPECT_EQ(steps.step(), "a5");
  EXPECT_EQ(steps.step(), "a1 b4");
}

TEST(Scheduler, TheLastToComeGivesUpItsBlocksAndStartsAnew) {
  Steps steps({.max_num_seqs = 4, .max_num_batched_tokens = 100}, 4);
  auto& a = steps.add("a", 7);
  auto& b = steps.add("b", 7);
  EXPECT_EQ(steps.step(), "a7 b7");
  EXPECT_EQ(steps.step(), "a1 b1");  // all four blocks are full
  EXPECT_EQ(steps.step(), "a1");     // and a needs a third
  EXPECT_EQ(b.status, SequenceStatus::kWaiting);
  EXPECT_EQ(b.num_preemptions, 1);
  EXPECT_EQ(b.size(), 9);  // what was drawn is kept
  EXPECT_EQ(steps.step(), "a1");
  steps.scheduler.remove(a);
  EXPECT_EQ(steps.step(), "b5");  // its first block was still there
  EXPECT_EQ(steps.scheduler.num_preemptions(), 1);
}

TEST(Scheduler, WhatFindsItsBeginningComputesTheRestInTheSameStep) {
  Steps steps({.max_num_seqs = 4, .max_num_batched_tokens = 100}, 100);
  auto& a = steps.add("a", 10);
  auto& b = steps.add("b", 10);
  auto& c = steps.add("c", 11);
  b.token_ids = a.token_ids;
  std::ranges::copy(a.token_ids, c.token_ids.begin());
  EXPECT_EQ(steps.step(),
            "b1 a10 c3");  // the same prompt, to its end; the same beginning, in blocks
}

TEST(Scheduler, EverythingThatRunsCanBeMadeToWait) {
  Steps steps({.max_num_seqs = 2, .max_num_batched_tokens = 100}, 100);
  for (const char* const name : {"a", "b", "c"}) steps.add(name, 3);
  steps.step();
  steps.scheduler.preempt_all();
  EXPECT_EQ(steps.blocks.num_free_blocks(), 100);
  EXPECT_EQ(steps.step(), "a2 b2");  // in their order; their prompts' ends were still there
}

}  // namespace scheduler_test
}  // namespace ferry::rollout
