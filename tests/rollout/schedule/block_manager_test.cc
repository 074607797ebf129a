#include "rollout/schedule/block_manager.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <utility>
#include <vector>

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
  EXPECT_EQ(one.block_tables[0], (std::vector<std::int32_t>{0, 1, 2}));
  auto two = sequence_of({1});
  EXPECT_FALSE(begin(blocks, two));
  EXPECT_FALSE(two.has_blocks());
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
  EXPECT_THROW(BlockManager(8, 4, /*enable_prefix_caching=*/true, 2), Error) << "no snapshots";
}

TEST(BlockManager, SharesFullBlocksOfEqualBeginnings) {
  BlockManager blocks(8, 4, true);
  auto one = sequence_of(count_up(10));
  auto two = sequence_of(count_up(11));
  ASSERT_TRUE(begin(blocks, one));
  ASSERT_TRUE(begin(blocks, two));
  EXPECT_EQ(two.num_cached_tokens, 8);
  EXPECT_EQ(two.block_tables[0][0], one.block_tables[0][0]);
  EXPECT_EQ(two.block_tables[0][1], one.block_tables[0][1]);
  EXPECT_NE(two.block_tables[0][2], one.block_tables[0][2]);
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
  EXPECT_EQ(two.block_tables[0][0], one.block_tables[0][0]);
  EXPECT_NE(two.block_tables[0][1], one.block_tables[0][1]);
  EXPECT_EQ(two.copied_from, std::vector{one.block_tables[0][1]});
  blocks.take_cached_prefix(longer);
  EXPECT_EQ(longer.num_cached_tokens, 8) << "a full block of the first";
  EXPECT_TRUE(longer.copied_from.empty());
  blocks.deallocate(longer);
  blocks.deallocate(one);
  EXPECT_EQ(blocks.num_free_blocks(), 3) << "the one that is copied is not free";
  two.num_computed_tokens = 8;
  two.token_ids.push_back(99);
  ASSERT_TRUE(blocks.allocate(two, 9));
  EXPECT_TRUE(two.copied_from.empty());
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
  const auto table = one.block_tables[0];
  blocks.deallocate(one);
  EXPECT_EQ(blocks.num_free_blocks(), 4);
  ASSERT_TRUE(begin(blocks, one));
  EXPECT_EQ(one.num_cached_tokens, 8);
  EXPECT_EQ(one.block_tables[0][0], table[0]);
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

using Table = std::vector<std::int32_t>;
constexpr auto kNone = Sequence::kNoBlock;

// Computes the tokens so far, and appends one.
void go_on(BlockManager& blocks, Sequence& sequence, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    sequence.num_computed_tokens = sequence.size();
    sequence.token_ids.push_back(7);
    ASSERT_TRUE(blocks.allocate(sequence, sequence.size()));
  }
}

TEST(BlockManager, GivesBackBlocksThatLieBeforeTheWindow) {
  BlockManager blocks(20, 4, true, 0, {std::nullopt, 6});
  auto one = sequence_of(count_up(9));
  ASSERT_TRUE(begin(blocks, one));
  EXPECT_EQ(one.block_tables, (std::vector<Table>{{0, 1, 2}, {3, 4, 5}}));
  go_on(blocks, one, 1);  // the row at 9 sees the keys from 4 on
  EXPECT_EQ(one.block_tables[1], (Table{kNone, 4, 5}));
  go_on(blocks, one, 3);  // the row at 12 sees those from 7 on
  EXPECT_EQ(one.block_tables[1].size(), 4U);
  EXPECT_EQ(one.block_tables[1][1], 4);
  go_on(blocks, one, 1);
  EXPECT_EQ(one.block_tables[1][1], kNone);
  EXPECT_EQ(blocks.num_free_blocks(), 20 - 4 - 2);
  go_on(blocks, one, 20);
  EXPECT_EQ(blocks.num_free_blocks(), 20 - 9 - 2);
  blocks.deallocate(one);
  EXPECT_EQ(blocks.num_free_blocks(), 20);
}

TEST(BlockManager, GoesOnWithAWindowForAsLongAsItLikes) {
  BlockManager blocks(3, 4, true, 0, {5});
  auto one = sequence_of(count_up(4));
  ASSERT_TRUE(begin(blocks, one));
  go_on(blocks, one, 100);
  EXPECT_EQ(most_blocks(blocks.windows(), 104, 1, 4), 3);
}

// The blocks before the window of the first own token may be those of others by now.
TEST(BlockManager, SharesWhatLiesInTheWindow) {
  BlockManager blocks(40, 4, true, 0, {std::nullopt, 6});
  auto one = sequence_of(count_up(24));
  ASSERT_TRUE(begin(blocks, one));
  const auto tables = one.block_tables;
  auto two = sequence_of(count_up(21));
  blocks.take_cached_prefix(two);
  EXPECT_EQ(two.num_cached_tokens, 20);
  EXPECT_EQ(two.block_tables[0], Table(tables[0].begin(), tables[0].begin() + 5));
  EXPECT_EQ(two.block_tables[1], (Table{kNone, kNone, kNone, tables[1][3], tables[1][4]}));
  blocks.deallocate(two);
  go_on(blocks, one, 8);
  EXPECT_EQ(one.block_tables[1][4], kNone);
  EXPECT_EQ(blocks.num_free_blocks(), 40 - 8 - 2);
  blocks.take_cached_prefix(two);
  EXPECT_EQ(two.num_cached_tokens, 20) << "free blocks keep their content until they are taken";
  blocks.deallocate(two);
}

TEST(BlockManager, SharesLessWhereAWindowHasLostABlock) {
  BlockManager blocks(12, 4, true, 0, {std::nullopt, 5});
  auto one = sequence_of(count_up(17));
  ASSERT_TRUE(begin(blocks, one));
  go_on(blocks, one, 8);
  auto two = sequence_of(count_up(17));
  blocks.take_cached_prefix(two);
  EXPECT_EQ(two.num_cached_tokens, 16) << "the window's last block is free, but there";
  blocks.deallocate(two);
  auto other = sequence_of(count_up(3, 100));
  ASSERT_TRUE(begin(blocks, other));
  go_on(blocks, one, 4);  // takes it
  blocks.take_cached_prefix(two);
  EXPECT_EQ(two.num_cached_tokens, 0) << "no window is whole, though the other group has all";
  EXPECT_FALSE(two.has_blocks());
}

TEST(BlockManager, CountsWhatASequenceLacks) {
  BlockManager blocks(40, 4, true, 0, {std::nullopt, 6});
  auto one = sequence_of(count_up(40));
  blocks.take_cached_prefix(one);
  EXPECT_EQ(blocks.num_missing(one, 40, 100), 20);
  EXPECT_EQ(blocks.num_missing(one, 40, 8), 10 + 5);  // 5 + 8 keys, in 5 blocks at most
  ASSERT_TRUE(blocks.allocate(one, 8));
  EXPECT_EQ(blocks.num_missing(one, 40, 8), 8 + 3);
}

// The content of the blocks' slots after the steps that compute them.
class Slots {
 public:
  explicit Slots(std::vector<Window> windows) : windows_(std::move(windows)) {}

  // Goes on from what the cache has of it.
  void compute(Sequence& sequence) {
    if (!sequence.copied_from.empty() &&
        sequence.num_computed_tokens == sequence.num_cached_tokens) {
      const auto begin = sequence.num_computed_tokens / 4 * 4;
      for (std::size_t group = 0; group < windows_.size(); ++group)
        for (auto i = begin; i < sequence.num_computed_tokens; ++i)
          at(sequence, group, i) = tokens_[{sequence.copied_from[group], i % 4}];
    }
    for (; sequence.num_computed_tokens < sequence.size(); ++sequence.num_computed_tokens)
      for (std::size_t group = 0; group < windows_.size(); ++group)
        at(sequence, group, sequence.num_computed_tokens) =
            up_to(sequence, group, sequence.num_computed_tokens);
  }
  // Compares the slots that the next token sees.
  bool are_those_of(const Sequence& sequence) {
    for (std::size_t group = 0; group < windows_.size(); ++group) {
      const auto begin = windows_[group] ? sequence.size() - *windows_[group] + 1 : 0;
      for (auto i = std::max<std::int64_t>(begin, 0); i < sequence.size(); ++i)
        if (at(sequence, group, i) != up_to(sequence, group, i)) return false;
    }
    return true;
  }

 private:
  using Tokens = std::vector<std::int64_t>;
  static Tokens up_to(const Sequence& sequence, std::size_t group, std::int64_t i) {
    Tokens tokens{sequence.token_ids.begin(), sequence.token_ids.begin() + i + 1};
    tokens.push_back(-1 - static_cast<std::int64_t>(group));
    return tokens;
  }
  Tokens& at(const Sequence& sequence, std::size_t group, std::int64_t i) {
    return tokens_[{sequence.block_tables[group][static_cast<std::size_t>(i / 4)], i % 4}];
  }
  std::vector<Window> windows_;
  std::map<std::pair<std::int32_t, std::int64_t>, Tokens> tokens_;  // by block and offset
};

// Against a model of what may be shared: whatever happens, sequences that live have blocks of their
// own, but for equal beginnings, and find there what is theirs.
class Sharing : public testing::TestWithParam<std::vector<Window>> {};

TEST_P(Sharing, NeverGivesABlockToDifferentTokens) {
  const auto& windows = GetParam();
  std::mt19937 random(5);
  Slots slots(windows);
  std::int64_t copied = 0;
  const auto num_blocks = 40 * std::ssize(windows);
  BlockManager blocks(num_blocks, 4, true, 0, windows);
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
      copied += sequence.copied_from.empty() ? 0 : 1;
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
    using Owner = std::pair<std::size_t, std::vector<std::int64_t>>;
    std::map<std::int32_t, Owner> owners;  // of each block: the group, and the tokens up to its end
    std::set<std::int32_t> used;
    for (const auto& sequence : live) {
      ASSERT_TRUE(slots.are_those_of(sequence)) << "step " << i;
      used.insert(sequence.copied_from.begin(), sequence.copied_from.end());
      for (std::size_t group = 0; group < windows.size(); ++group) {
        const auto& table = sequence.block_tables[group];
        for (std::size_t b = 0; b < table.size(); ++b) {
          if (table[b] == kNone) continue;
          used.insert(table[b]);
          const auto end = std::min<std::size_t>(4 * (b + 1), sequence.token_ids.size());
          const Owner owner{group,
                            {sequence.token_ids.begin(),
                             sequence.token_ids.begin() + static_cast<std::ptrdiff_t>(end)}};
          const auto [known, fresh] = owners.try_emplace(table[b], owner);
          ASSERT_TRUE(fresh || (known->second == owner && end % 4 == 0)) << "step " << i;
        }
      }
    }
    ASSERT_EQ(blocks.num_free_blocks(), num_blocks - std::ssize(used));
  }
  EXPECT_GT(shared, 1000);
  EXPECT_GT(copied, 100);
}

INSTANTIATE_TEST_SUITE_P(BlockManager,
                         Sharing,
                         testing::Values(std::vector<Window>{std::nullopt},
                                         std::vector<Window>{7},
                                         std::vector<Window>{std::nullopt, 1},
                                         std::vector<Window>{std::nullopt, std::nullopt, 6, 6}));

}  // namespace block_manager_test
}  // namespace ferry::rollout
