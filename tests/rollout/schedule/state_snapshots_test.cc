// States that are kept behind prefixes: their slots, the blocks that sequences begin with, and the
// steps that they wait for.
#include "rollout/schedule/state_snapshots.h"

#include <gtest/gtest.h>

#include <list>
#include <numeric>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "rollout/schedule/scheduler.h"
#include "rollout/schedule/slot_copies.h"

namespace ferry::rollout {
namespace state_snapshots_test {

constexpr PrefixHash kA{.low = 1}, kB{.low = 2}, kC{.low = 3};

std::int64_t keep(StateSnapshots& snapshots, const PrefixHash& hash) {
  snapshots.announce(hash);
  return snapshots.keep(hash);
}

TEST(StateSnapshots, AreAnnouncedAndThenKept) {
  StateSnapshots snapshots(10, 2);
  EXPECT_FALSE(snapshots.is_coming(kA));
  snapshots.announce(kA);
  EXPECT_TRUE(snapshots.is_coming(kA));
  EXPECT_FALSE(snapshots.has(kA));
  EXPECT_EQ(snapshots.num_free(), 1);
  EXPECT_EQ(snapshots.keep(kA), 10);
  EXPECT_FALSE(snapshots.is_coming(kA));
  EXPECT_TRUE(snapshots.has(kA));
  EXPECT_EQ(snapshots.use(kA), 10);
  EXPECT_EQ(snapshots.num_free(), 2);
  snapshots.announce(kB);
  snapshots.withdraw(kB);
  EXPECT_FALSE(snapshots.is_coming(kB));
  EXPECT_THROW(snapshots.keep(kB), Error);
}

TEST(StateSnapshots, GiveUpTheOneThatWasUnusedLongest) {
  StateSnapshots snapshots(0, 2);
  EXPECT_EQ(keep(snapshots, kA), 0);
  EXPECT_EQ(keep(snapshots, kB), 1);
  snapshots.use(kA);
  EXPECT_EQ(keep(snapshots, kC), 1);
  EXPECT_TRUE(snapshots.has(kA));
  EXPECT_FALSE(snapshots.has(kB));
  EXPECT_EQ(keep(snapshots, kA), -1) << "it is there already";
  snapshots.forget(kA);
  EXPECT_FALSE(snapshots.has(kA));
  EXPECT_EQ(keep(snapshots, kB), 0);
}

// A scheduler over blocks of four tokens and four slots of states whose steps are computed by
// nobody: the content of a slot is the number of tokens behind which it has the states, and the sum
// of these.
class Steps {
 public:
  explicit Steps(std::int64_t num_snapshots = 4, SchedulerOptions options = kOptions)
      : blocks(100, 4, true, kSlots, {std::nullopt}, num_snapshots),
        scheduler(options, blocks),
        states_(static_cast<std::size_t>(kSlots + num_snapshots)) {}

  Sequence& add(const std::string& name, std::vector<std::int64_t> prompt) {
    auto& sequence = sequences.emplace_back(
        Sequence{.request_id = name,
                 .token_ids = prompt,
                 .num_prompt_tokens = static_cast<std::int64_t>(prompt.size())});
    scheduler.add(sequence);
    return sequence;
  }

  // "a3 b1": the sequences of a step, with the number of their new tokens.
  std::string step() {
    std::string text;
    const auto scheduled = scheduler.schedule();
    const auto copies = slot_copies(scheduled, 1, 4);
    for (const auto& one : copies.begun_states) at(one.to) = at(one.from);
    for (const auto& [sequence, tokens] : scheduled) {
      auto& state = at(sequence->state_slot);
      if (sequence->num_computed_tokens == 0) state = {};
      EXPECT_EQ(state, of(*sequence, sequence->num_computed_tokens)) << sequence->request_id;
      sequence->num_computed_tokens += tokens;
      state = of(*sequence, sequence->num_computed_tokens);
      text += (text.empty() ? "" : " ") + sequence->request_id + std::to_string(tokens);
      if (sequence->num_computed_tokens == sequence->size()) sequence->token_ids.push_back(7);
    }
    for (const auto& one : copies.kept_states) at(one.to) = at(one.from);
    return text;
  }

  static constexpr std::int64_t kSlots = 4;
  static constexpr SchedulerOptions kOptions{.max_num_seqs = kSlots, .max_num_batched_tokens = 100};
  std::list<Sequence> sequences;
  BlockManager blocks;
  Scheduler scheduler;

 private:
  using State = std::pair<std::int64_t, std::int64_t>;
  static State of(const Sequence& sequence, std::int64_t tokens) {
    return {tokens, std::accumulate(sequence.token_ids.begin(), sequence.token_ids.begin() + tokens,
                                    std::int64_t{0})};
  }
  State& at(std::int64_t slot) { return states_[static_cast<std::size_t>(slot)]; }

  std::vector<State> states_;
};

std::vector<std::int64_t> count_up(std::int64_t size, std::int64_t from = 0) {
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(size));
  std::iota(tokens.begin(), tokens.end(), from);
  return tokens;
}

std::vector<std::int64_t> joined(std::vector<std::int64_t> a, const std::vector<std::int64_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST(SharedStates, SamplesOfAPromptWaitForItsBlocksAndComputeTheRest) {
  Steps steps;
  for (const char* const name : {"a", "b", "c"}) steps.add(name, count_up(10));
  EXPECT_EQ(steps.step(), "a8");
  EXPECT_EQ(steps.step(), "a2 b2 c2");
  EXPECT_EQ(steps.step(), "a1 b1 c1");
  steps.add("d", count_up(8));  // its last token is computed, and so is its block
  EXPECT_EQ(steps.step(), "a1 b1 c1 d4");
}

TEST(SharedStates, ShortPromptsShareNothing) {
  Steps steps;
  for (const char* const name : {"a", "b"}) steps.add(name, count_up(4));
  EXPECT_EQ(steps.step(), "a4 b4");
}

TEST(SharedStates, OthersBeginWhileASequenceWaits) {
  Steps steps;
  steps.add("a", count_up(10));
  steps.add("b", count_up(10));
  steps.add("c", count_up(3, 50));
  EXPECT_EQ(steps.step(), "a8 c3");
  EXPECT_EQ(steps.step(), "c1 a2 b2");
}

// Waiting ones have their places: no more begin than can run beside them.
TEST(SharedStates, NobodyTakesThePlaceOfASequenceThatWaits) {
  Steps steps;
  for (const char* const name : {"a", "b", "c"}) steps.add(name, count_up(10));
  steps.add("d", count_up(3, 50));
  steps.add("e", count_up(3, 60));
  EXPECT_EQ(steps.step(), "a8 d3");
  EXPECT_EQ(steps.step(), "d1 a2 b2 c2");
}

TEST(SharedStates, AChunkedPromptIsWaitedForToItsEnd) {
  Steps steps(4, {.max_num_seqs = 4, .max_num_batched_tokens = 9});
  steps.add("a", count_up(21));
  steps.add("b", count_up(21));
  EXPECT_EQ(steps.step(), "a8");  // whole blocks
  EXPECT_EQ(steps.step(), "a8");
  EXPECT_EQ(steps.step(), "a4");
  EXPECT_EQ(steps.step(), "a1 b1");
}

TEST(SharedStates, WhoeverWaitsBeginsIfTheOtherEnds) {
  Steps steps(4, {.max_num_seqs = 4, .max_num_batched_tokens = 9});
  auto& a = steps.add("a", count_up(21));
  steps.add("b", count_up(21));
  EXPECT_EQ(steps.step(), "a8");
  steps.scheduler.remove(a);
  EXPECT_EQ(steps.step(), "b8");  // states behind the block are not kept: nobody had asked
  EXPECT_EQ(steps.step(), "b8");
}

// The third prompt knows what the first two have in common.
TEST(SharedStates, PromptsThatBeginAlikeShareTheirBeginning) {
  Steps steps;
  const auto beginning = count_up(9);
  steps.add("a", joined(beginning, count_up(8, 50)));
  steps.add("b", joined(beginning, count_up(8, 60)));
  steps.add("c", joined(beginning, count_up(8, 70)));
  EXPECT_EQ(steps.step(), "a16 b8");
  EXPECT_EQ(steps.step(), "a1 b8 c8");
  EXPECT_EQ(steps.step(), "a1 b1 c1");
}

TEST(SharedStates, AsManyPromptsBeginAsThereAreSlotsToKeepTheirStates) {
  Steps steps(1);
  steps.add("a", count_up(10));
  steps.add("b", count_up(10, 20));
  steps.add("c", count_up(10));
  EXPECT_EQ(steps.step(), "a8");
  EXPECT_EQ(steps.step(), "a2 b8 c2") << "c copies the slot before b's states are kept in it";
  steps.add("d", count_up(10));
  EXPECT_EQ(steps.step(), "a1 c1 b2 d8") << "the slot is b's";
}

TEST(SharedStates, APreemptedSequenceGoesOnFromThoseOfItsPrompt) {
  Steps steps;
  steps.add("a", count_up(10));
  steps.step();
  steps.step();
  EXPECT_EQ(steps.step(), "a1");
  steps.scheduler.preempt_all();
  EXPECT_EQ(steps.step(), "a4");
  steps.scheduler.preempt_all();
  steps.blocks.reset_prefix_cache();
  EXPECT_EQ(steps.step(), "a8") << "nothing of old weights is used";
  EXPECT_EQ(steps.step(), "a5");
}

TEST(SharedStates, StatesGoWithTheLastBlockOfTheirPrefix) {
  Steps steps;
  auto& a = steps.add("a", count_up(10));
  steps.step();
  steps.step();
  steps.scheduler.remove(a);
  auto& all = steps.add("b", count_up(397, 1000));  // takes all blocks
  for (int i = 0; i < 5; ++i) steps.step();
  steps.scheduler.remove(all);
  steps.add("c", count_up(10));
  EXPECT_EQ(steps.step(), "c8");
}

// A step has room for a block beside all decoding sequences, or takes what it has room for.
TEST(SharedStates, PromptsAreCutBetweenBlocks) {
  Steps roomy(4, {.max_num_seqs = 4, .max_num_batched_tokens = 8});
  roomy.add("a", count_up(7));
  roomy.add("b", count_up(7, 20));
  EXPECT_EQ(roomy.step(), "a4 b4");
  EXPECT_EQ(roomy.step(), "a3 b3");
  roomy.add("c", count_up(7, 40));
  roomy.add("d", count_up(7, 60));
  EXPECT_EQ(roomy.step(), "a1 b1 c4") << "no block of d beside them";
  Steps narrow(4, {.max_num_seqs = 4, .max_num_batched_tokens = 7});
  narrow.add("a", count_up(7));
  narrow.add("b", count_up(7, 20));
  EXPECT_EQ(narrow.step(), "a4 b3");
}

}  // namespace state_snapshots_test
}  // namespace ferry::rollout
