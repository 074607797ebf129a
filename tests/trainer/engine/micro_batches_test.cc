#include "trainer/engine/micro_batches.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>

#include "distckpt/base/error.h"
#include "models/distributed/world.h"
#include "tests/support/models/tiny_training.h"

namespace ferry::trainer {
namespace micro_batches_test {

using Lengths = std::vector<std::int64_t>;
using Parts = std::vector<Partition>;

const Lengths kLengths{512, 37, 1024, 300, 300, 1, 2048, 777, 64, 64, 900, 1500};

Lengths work_of(const Lengths& lengths) {
  Lengths work;
  for (const auto length : lengths) work.push_back(calculate_workload(length));
  return work;
}

std::int64_t sum_of(const Partition& part, const Lengths& values) {
  std::int64_t sum = 0;
  for (const auto i : part) sum += values[i];
  return sum;
}

void expect_each_once(const Parts& parts, std::size_t count) {
  std::multiset<std::size_t> seen;
  for (const auto& part : parts) {
    EXPECT_FALSE(part.empty());
    seen.insert(part.begin(), part.end());
  }
  EXPECT_EQ(seen.size(), count);
  for (std::size_t i = 0; i < count; ++i) EXPECT_EQ(seen.count(i), 1U) << i;
}

std::int64_t largest(const Parts& parts, const Lengths& values) {
  std::int64_t most = 0;
  for (const auto& part : parts) most = std::max(most, sum_of(part, values));
  return most;
}

// The smallest possible largest sum.
std::int64_t optimum(const Lengths& values, std::size_t k) {
  std::int64_t best = std::accumulate(values.begin(), values.end(), std::int64_t{0});
  std::size_t ways = 1;
  for (std::size_t i = 0; i < values.size(); ++i) ways *= k;
  for (std::size_t way = 0; way < ways; ++way) {
    Lengths sums(k);
    auto rest = way;
    for (const auto value : values) {
      sums[rest % k] += value;
      rest /= k;
    }
    best = std::min(best, std::ranges::max(sums));
  }
  return best;
}

// The expected parts are the results of verl's karmarkar_karp, and of the functions built on it,
// for these lengths.
TEST(SeqlenBalancing, GivesThePartsOfVerl) {
  EXPECT_EQ(karmarkar_karp(work_of(kLengths), 4, true),
            (Parts{{3, 5, 6}, {1, 4, 11}, {7, 8, 10}, {0, 2, 9}}));
  EXPECT_EQ(karmarkar_karp(work_of(kLengths), 5, false),
            (Parts{{6}, {11}, {2, 3}, {4, 8, 9, 10}, {0, 1, 5, 7}}));
  EXPECT_EQ(karmarkar_karp(Lengths{5, 5, 5, 5, 5, 5, 5, 5, 5, 7, 7}, 4, false),
            (Parts{{0, 3, 9}, {2, 4, 7}, {1, 5, 8}, {6, 10}}));
  EXPECT_EQ(karmarkar_karp(Lengths(8, 5), 4, true), (Parts{{0, 7}, {1, 6}, {2, 5}, {3, 4}}));
}

TEST(SeqlenBalancing, SharesEverythingOutAndIsNearTheOptimum) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 60; ++round) {
    const std::size_t k = 2 + random() % 2;
    Lengths values;
    for (std::size_t i = 0; i < k + random() % (8 - k); ++i)
      values.push_back(1 + static_cast<std::int64_t>(random() % 1000));
    const auto parts = karmarkar_karp(values, k, false);
    EXPECT_EQ(parts.size(), k);
    expect_each_once(parts, values.size());
    // The largest differencing method never exceeds 4/3 - 1/(3k) of the optimum (Michiels 2003).
    EXPECT_LE(
        static_cast<double>(largest(parts, values)),
        static_cast<double>(optimum(values, k)) * (4.0 / 3 - 1.0 / (3.0 * static_cast<double>(k))) +
            1e-9);
    Lengths even(k * (1 + random() % 5));
    for (auto& value : even) value = 1 + static_cast<std::int64_t>(random() % 1000);
    const auto equal = karmarkar_karp(even, k, true);
    expect_each_once(equal, even.size());
    for (const auto& part : equal) EXPECT_EQ(part.size(), even.size() / k);
  }
}

TEST(SeqlenBalancing, RefusesWhatCannotBeSharedOut) {
  EXPECT_THROW(karmarkar_karp(Lengths{1, 2}, 3, false), Error);
  EXPECT_THROW(karmarkar_karp(Lengths{1, 2, 3}, 2, true), Error);
}

TEST(MicroBatches, BalanceABatchAsVerlDoes) {
  EXPECT_EQ(balance_batch(kLengths, 3), (Parts{{5, 0, 6, 9}, {1, 7, 11, 3}, {8, 10, 2, 4}}));
}

TEST(MicroBatches, AreThoseOfVerlOnEveryRank) {
  const Lengths other{100, 100, 100, 100, 100, 100, 100, 2000, 2000, 50};
  const auto ranks = rearrange_micro_batches({kLengths, other}, {.max_token_len = 2100});
  EXPECT_EQ(ranks[0], (Parts{{3, 11}, {6}, {1, 7, 8, 9, 10}, {0, 2, 4, 5}}));
  EXPECT_EQ(ranks[1], (Parts{{0, 2, 4, 5}, {8}, {7}, {1, 3, 6, 9}}));
}

TEST(MicroBatches, KeepTheBudgetAndHaveOneCountOnAllRanks) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 100; ++round) {
    std::vector<Lengths> ranks(1 + random() % 4);
    for (auto& lengths : ranks) {
      lengths.resize(24 + random() % 20);
      for (auto& length : lengths) length = 1 + static_cast<std::int64_t>(random() % 900);
    }
    const DynamicBatchOptions options{
        .max_token_len = 1000 + static_cast<std::int64_t>(random() % 4000),
        .num_batches_divided_by = 1 + random() % 3};
    std::vector<Parts> batches;
    try {
      batches = rearrange_micro_batches(ranks, options);
    } catch (const Error& error) {  // some rank is too poor: then its sequences are long
      EXPECT_EQ(error.kind(), ErrorKind::kUsage);
      continue;
    }
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      expect_each_once(batches[rank], ranks[rank].size());
      EXPECT_EQ(batches[rank].size(), batches[0].size());
      EXPECT_EQ(batches[rank].size() % options.num_batches_divided_by, 0U);
      EXPECT_LE(largest(batches[rank], ranks[rank]), options.max_token_len);
    }
  }
  EXPECT_THROW(rearrange_micro_batches({{10, 2000}}, {.max_token_len = 1000}), Error);
  EXPECT_THROW(rearrange_micro_batches({{900, 900, 900}, {1, 1}}, {.max_token_len = 1000}), Error);
}

TEST(MicroBatches, RanksTellEachOtherTheirLengthsAndPackTheirOwn) {
  models::run_ranks(2, {}, [](models::World& world) {
    const models::ParallelState mesh(world, {}, "mesh");
    const Lengths mine = world.rank() == 0 ? Lengths{3, 2, 4} : Lengths{5, 1};
    const auto all = gather_seqlens(mesh.dp(), mine);
    EXPECT_EQ(all, (std::vector<Lengths>{{3, 2, 4}, {5, 1}}));
    std::vector<at::Tensor> sequences;
    for (const auto length : mine) sequences.push_back(at::arange(length, at::kLong));
    const auto parts = split_micro_batches(mine.size(), 2);
    const auto batches = pack_micro_batches(sequences, parts, mesh);
    ASSERT_EQ(batches.size(), world.rank() == 0 ? 2U : 1U);
    EXPECT_EQ(batches[0].num_tokens(), mine[0] + mine[1]);
    EXPECT_EQ(batches[0].segments().size(), 2U);
  });
}

TEST(ShapeOf, IsThatOfTheLargestMicroBatch) {
  models::World world({.device = at::kCPU});
  const models::ParallelState mesh(world, {}, "mesh");
  const auto pack = [&](const std::vector<std::int64_t>& lengths) {
    return models::SequencePartition(models::pack(support::random_sequences(lengths, 96, 1)), mesh);
  };
  const std::vector batches{pack({40, 24}), pack({10, 20, 50})};
  const auto shape = shape_of(batches, 1);
  EXPECT_EQ(shape.largest.tokens, 80);
  EXPECT_DOUBLE_EQ(shape.largest.keys, (10.0 * 10 + 20 * 20 + 50 * 50) / 80);
  EXPECT_EQ(shape.longest_sequence, 50);
  EXPECT_EQ(shape.num_micro_batches, 2U);
}

}  // namespace micro_batches_test
}  // namespace ferry::trainer
