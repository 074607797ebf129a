#include "rollout/schedule/block_manager.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <utility>

#include "distckpt/base/error.h"

namespace ferry::rollout {
namespace block_manager_test {

Sequence sequence_of(std::vector<std::int64_t> tokens) {
  Sequence sequence{.request_id = "a", .token_ids = std::move(tokens)};
  sequence.num_prompt_tokens = sequence.size();
  return sequence;
}

std::vector<std::int64_t> count_up(std::int64_t size, std::int64_t from = 0) {
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(size));
  std::iota(tokens.begin(), tokens.end(), from);
  return tokens;
}

// Begins a sequence like the scheduler.
bool begin(BlockManager& blocks, Sequence& sequence) {
  blocks.take_cached_prefix(sequence);
  if (blocks.allocate(sequence, sequence.size())) return true;
  blocks.deallocate(sequence);
  return false;
}

TEST(BlockManager, TakesWhatASequenceNeedsOrNothing) {
  BlockManager blocks(3, 4, false);
  auto one = sequence_of(count_up(9));
  EXPECT_TRUE(begin(blocks, one));
  EXPECT_EQ(one.block_table, (std::vector<std::int32_t>{0, 1, 2}));
  auto two = sequence_of({1});
  EXPECT_FALSE(begin(blocks, two));
  EXPECT_TRUE(two.block_table.empty());
  EXPECT_TRUE(blocks.allocate(one, 12));  // fits the last block
  EXPECT_FALSE(blocks.allocate(one, 13));
  blocks.deallocate(one);
  EXPECT_EQ(blocks.num_free_blocks(), 3);
  EXPECT_TRUE(begin(blocks, two));
  EXPECT_THROW(BlockManager(0, 4, true), Error);
}

TEST(BlockManager, GivesEachSequenceASlotForItsStatesWhileItHasBlocks) {
  BlockManager blocks(8, 4, /*enable_prefix_caching=*/false, /*num_state_slots=*/2);
  auto one = sequence_of(count_up(9));
  auto two = sequence_of(count_up(3));
  ASSERT_TRUE(begin(blocks, one));
  ASSERT_TRUE(begin(blocks, two));
  EXPECT_TRUE(blocks.allocate(one, 10));
  EXPECT_EQ(one.state_slot, 0);
  EXPECT_EQ(two.state_slot, 1);
  blocks.deallocate(one);
  EXPECT_EQ(one.state_slot, -1);
  auto three = sequence_of({1});
  ASSERT_TRUE(begin(blocks, three));
  EXPECT_EQ(three.state_slot, 0);
  EXPECT_THROW(BlockManager(8, 4, /*enable_prefix_caching=*/true, 2), Error);
}

TEST(BlockManager, SharesFullBlocksOfEqualBeginnings) {
  BlockManager blocks(8, 4, true);
  auto one = sequence_of(count_up(10));
  auto two = sequence_of(count_up(11));
  ASSERT_TRUE(begin(blocks, one));
  ASSERT_TRUE(begin(blocks, two));
  EXPECT_EQ(two.num_cached_tokens, 8);
  EXPECT_EQ(two.block_table[0], one.block_table[0]);
  EXPECT_EQ(two.block_table[1], one.block_table[1]);
  EXPECT_NE(two.block_table[2], one.block_table[2]);
  EXPECT_EQ(blocks.num_free_blocks(), 4);
  blocks.deallocate(one);
  EXPECT_EQ(blocks.num_free_blocks(), 5);  // the shared ones stay
  auto other = sequence_of(count_up(10));
  other.token_ids[1] = 99;  // the first block differs, so nothing behind it is the same
  ASSERT_TRUE(begin(blocks, other));
  EXPECT_EQ(other.num_cached_tokens, 0);
}

// Two sequences of a prompt write behind it: what they copy stays until they have.
TEST(BlockManager, CopiesTheEndOfTheSamePrompt) {
  BlockManager blocks(6, 4, true);
  auto one = sequence_of(count_up(8));
  auto two = sequence_of(count_up(8));
  auto longer = sequence_of(count_up(9));
  ASSERT_TRUE(begin(blocks, one));
  ASSERT_TRUE(begin(blocks, two));
  EXPECT_EQ(two.num_cached_tokens, 7);
  EXPECT_EQ(two.block_table[0], one.block_table[0]);
  EXPECT_NE(two.block_table[1], one.block_table[1]);
  EXPECT_EQ(two.copied_from, one.block_table[1]);
  blocks.take_cached_prefix(longer);
  EXPECT_EQ(longer.num_cached_tokens, 8) << "a full block of the first";
  EXPECT_EQ(longer.copied_from, -1);
  blocks.deallocate(longer);
  blocks.deallocate(one);
  EXPECT_EQ(blocks.num_free_blocks(), 3) << "the one that is copied is not free";
  two.num_computed_tokens = 8;
  two.token_ids.push_back(99);
  ASSERT_TRUE(blocks.allocate(two, 9));
  EXPECT_EQ(two.copied_from, -1);
  EXPECT_EQ(blocks.num_free_blocks(), 3);
  blocks.deallocate(two);
  EXPECT_EQ(blocks.num_free_blocks(), 6);
}

TEST(BlockManager, CopiesNothingForWhichABlockWouldBeMissing) {
  BlockManager blocks(2, 4, true);
  auto one = sequence_of(count_up(7));
  ASSERT_TRUE(begin(blocks, one));
  blocks.deallocate(one);
  ASSERT_TRUE(begin(blocks, one));
  EXPECT_EQ(one.num_cached_tokens, 4);
}

TEST(BlockManager, ComputesTheLastTokenAlways) {
  BlockManager blocks(8, 4, true);
  auto one = sequence_of(count_up(8));
  auto two = sequence_of(count_up(8));
  ASSERT_TRUE(begin(blocks, one));
  ASSERT_TRUE(begin(blocks, two));
  EXPECT_EQ(two.num_cached_tokens, 7);
}

TEST(BlockManager, FindsBlocksThatNobodyUsesUntilTheyAreTaken) {
  BlockManager blocks(4, 4, true);
  auto one = sequence_of(count_up(9));
  ASSERT_TRUE(begin(blocks, one));
  const auto table = one.block_table;
  blocks.deallocate(one);
  EXPECT_EQ(blocks.num_free_blocks(), 4);
  ASSERT_TRUE(begin(blocks, one));
  EXPECT_EQ(one.num_cached_tokens, 8);
  EXPECT_EQ(one.block_table[0], table[0]);
  blocks.deallocate(one);
  auto other =
      sequence_of(count_up(12, 100));  // takes the unused block, then those given back, ends first
  ASSERT_TRUE(begin(blocks, other));
  auto again = sequence_of(count_up(9));
  blocks.take_cached_prefix(again);
  EXPECT_EQ(again.num_cached_tokens, 4);
}

TEST(BlockManager, ForgetsWhenWeightsChange) {
  BlockManager blocks(8, 4, true);
  auto one = sequence_of(count_up(9));
  ASSERT_TRUE(begin(blocks, one));
  blocks.deallocate(one);
  blocks.reset_prefix_cache();
  auto two = sequence_of(count_up(9));
  blocks.take_cached_prefix(two);
  EXPECT_EQ(two.num_cached_tokens, 0);
}

// The content of the blocks' slots after the steps that compute them.
class Slots {
 public:
  // From what the cache has of it on.
  void compute(Sequence& sequence) {
    if (sequence.copied_from >= 0 && sequence.num_computed_tokens == sequence.num_cached_tokens) {
      const auto begin = sequence.num_computed_tokens / 4 * 4;
      for (auto i = begin; i < sequence.num_computed_tokens; ++i)
        at(sequence, i) = tokens_[{sequence.copied_from, i % 4}];
    }
    for (; sequence.num_computed_tokens < sequence.size(); ++sequence.num_computed_tokens)
      at(sequence, sequence.num_computed_tokens) = up_to(sequence, sequence.num_computed_tokens);
  }
  bool are_those_of(const Sequence& sequence) {
    for (std::int64_t i = 0; i < sequence.size(); ++i)
      if (at(sequence, i) != up_to(sequence, i)) return false;
    return true;
  }

 private:
  using Tokens = std::vector<std::int64_t>;
  static Tokens up_to(const Sequence& sequence, std::int64_t i) {
    return {sequence.token_ids.begin(), sequence.token_ids.begin() + i + 1};
  }
  Tokens& at(const Sequence& sequence, std::int64_t i) {
    return tokens_[{sequence.block_table[static_cast<std::size_t>(i / 4)], i % 4}];
  }
  std::map<std::pair<std::int32_t, std::int64_t>, Tokens> tokens_;  // by block and offset
};

// Against a model of what may be shared: whatever happens, sequences that live have blocks of their
// own, but for equal beginnings, and find there what is theirs.
TEST(BlockManager, NeverGivesABlockToDifferentTokens) {
  std::mt19937 random(5);
  Slots slots;
  std::int64_t copied = 0;
  BlockManager blocks(40, 4, true);
  std::vector<Sequence> live;
  std::int64_t shared = 0;
  for (int i = 0; i < 20000; ++i) {
    const auto action = random() % 4;
    if (action == 0 || live.empty()) {
      std::vector<std::int64_t> tokens(1 + random() % 20);
      for (auto& token : tokens) token = random() % 2;
      auto sequence = sequence_of(tokens);
      if (begin(blocks, sequence)) {
        slots.compute(sequence);
        live.push_back(sequence);
      }
      shared += sequence.num_cached_tokens;
      copied += sequence.copied_from >= 0 ? 1 : 0;
    } else if (action < 3) {
      auto& sequence = live[random() % live.size()];
      if (blocks.allocate(sequence, sequence.size() + 1)) {
        sequence.token_ids.push_back(random() % 2);
        blocks.allocate(sequence, sequence.size());
        slots.compute(sequence);
      }
    } else {
      const auto at = live.begin() + static_cast<std::ptrdiff_t>(random() % live.size());
      blocks.deallocate(*at);
      live.erase(at);
    }
    std::map<std::int32_t, std::vector<std::int64_t>>
        beginning;  // of each block: the tokens up to its end
    std::set<std::int32_t> used;
    for (const auto& sequence : live) {
      ASSERT_TRUE(slots.are_those_of(sequence)) << "step " << i;
      used.insert(sequence.block_table.begin(), sequence.block_table.end());
      if (sequence.copied_from >= 0) used.insert(sequence.copied_from);
      for (std::size_t b = 0; b < sequence.block_table.size(); ++b) {
        const auto end = std::min<std::size_t>(4 * (b + 1), sequence.token_ids.size());
        const std::vector tokens(sequence.token_ids.begin(),
                                 sequence.token_ids.begin() + static_cast<std::ptrdiff_t>(end));
        const auto [known, fresh] = beginning.try_emplace(sequence.block_table[b], tokens);
        ASSERT_TRUE(fresh || (known->second == tokens && end % 4 == 0)) << "step " << i;
      }
    }
    ASSERT_EQ(blocks.num_free_blocks(), 40 - static_cast<std::int64_t>(used.size()));
  }
  EXPECT_GT(shared, 1000);
  EXPECT_GT(copied, 100);
}

}  // namespace block_manager_test
}  // namespace ferry::rollout
