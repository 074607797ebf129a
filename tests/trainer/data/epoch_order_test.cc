#include "trainer/data/epoch_order.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <map>
#include <numeric>
#include <set>
#include <vector>

#include "trainer/data/permutation.h"

namespace ferry::trainer {
namespace epoch_order_test {

TEST(Permutation, MapsEachNumberToAnother) {
  for (const std::uint64_t n : {1, 2, 3, 7, 100, 65'535, 65'536, 65'537, 200'000}) {
    const Permutation permuted(n, 42);
    std::vector<bool> met(n);
    for (std::uint64_t i = 0; i < n; ++i) {
      const auto value = permuted(i);
      ASSERT_LT(value, n);
      ASSERT_FALSE(met[value]) << n << ": " << value;
      met[value] = true;
    }
  }
}

// The numbers are those of the format: a checkpoint's cursor counts on them. They were computed by
// the same formula in Python (unbounded integers, masked).
TEST(Permutation, IsTheSameEverywhere) {
  EXPECT_EQ(mix64(0), 0xe220a8397b1dcdafULL);  // the first output of SplitMix64 from seed 0
  const Permutation permuted(10, 7);
  std::vector<std::uint64_t> found(10);
  for (std::uint64_t i = 0; i < 10; ++i) found[i] = permuted(i);
  EXPECT_EQ(found, (std::vector<std::uint64_t>{5, 0, 4, 3, 8, 9, 1, 6, 7, 2}));
  EXPECT_EQ(Permutation(1'000'000'007, 3)(123'456'789), 119355078U);
}

// Over many keys, each of the 24 orders of four is as likely: chi-squared of 23 degrees of freedom
// stays below 60 but once in 30,000 seeds, and the keys are fixed.
TEST(Permutation, ReachesAllOrdersOfAFewAlike) {
  std::map<std::array<std::uint64_t, 4>, int> counts;
  constexpr int kKeys = 4800;
  for (int key = 0; key < kKeys; ++key) {
    const Permutation permuted(4, mix64(static_cast<std::uint64_t>(key)));
    ++counts[{permuted(0), permuted(1), permuted(2), permuted(3)}];
  }
  EXPECT_EQ(counts.size(), 24U);
  double chi_squared = 0;
  for (const auto& [order, count] : counts)
    chi_squared += std::pow(count - kKeys / 24.0, 2) / (kKeys / 24.0);
  EXPECT_LT(chi_squared, 60);
}

std::vector<ChunkSize> chunks_of(std::initializer_list<std::int64_t> sizes) {
  std::vector<ChunkSize> chunks;
  for (const auto size : sizes) chunks.push_back({.num_records = size, .num_bytes = size * 10});
  return chunks;
}

std::vector<EpochOrder::Place> places_of(const EpochOrder& order) {
  std::vector<EpochOrder::Place> places;
  for (std::int64_t i = 0; i < order.size(); ++i) places.push_back(order.at(i));
  return places;
}

const std::vector<ChunkSize> kChunks = chunks_of({5, 0, 7, 3, 0, 9, 4, 6, 0});

TEST(EpochOrder, VisitsEachRecordOnceWhateverTheBuffer) {
  for (const std::int64_t buffer : {0, 60, 100, 10'000}) {
    const EpochOrder order(kChunks, {.seed = 3, .shuffle_buffer_bytes = buffer}, 2);
    ASSERT_EQ(order.size(), 34);
    std::set<std::pair<std::size_t, std::int64_t>> met;
    for (const auto& place : places_of(order)) {
      EXPECT_LT(place.row, kChunks[place.chunk].num_records);
      EXPECT_TRUE(met.emplace(place.chunk, place.row).second);
    }
    EXPECT_EQ(met.size(), 34U);
  }
}

TEST(EpochOrder, LeavesAWindowForGoodAndKeepsItInTheBuffer) {
  const EpochOrder order(kChunks, {.seed = 3, .shuffle_buffer_bytes = 100}, 0);
  std::map<std::size_t, std::set<std::size_t>> chunks;  // of each window
  std::size_t window = 0;
  for (const auto& place : places_of(order)) {
    EXPECT_GE(place.window, window);
    window = place.window;
    chunks[window].insert(place.chunk);
  }
  EXPECT_GT(chunks.size(), 2U);
  for (const auto& [number, members] : chunks) {
    std::int64_t bytes = 0;
    for (const auto chunk : members) bytes += kChunks[chunk].num_bytes;
    EXPECT_LE(bytes, 100) << number;
  }
}

TEST(EpochOrder, IsThatOfTheFilesWhereNothingIsShuffled) {
  const EpochOrder order(kChunks, {.shuffle = false}, 5);
  std::size_t chunk = 0;
  std::int64_t row = 0;
  for (const auto& place : places_of(order)) {
    while (row == kChunks[chunk].num_records) ++chunk, row = 0;
    EXPECT_EQ(place.chunk, chunk);
    EXPECT_EQ(place.row, row++);
  }
}

TEST(EpochOrder, DependsOnSeedAndEpochAlone) {
  const auto numbers = [](std::uint64_t seed, std::int64_t epoch) {
    std::vector<std::pair<std::size_t, std::int64_t>> found;
    for (const auto& place : places_of(EpochOrder(kChunks, {.seed = seed}, epoch)))
      found.emplace_back(place.chunk, place.row);
    return found;
  };
  EXPECT_EQ(numbers(1, 0), numbers(1, 0));
  EXPECT_NE(numbers(1, 0), numbers(1, 1));
  EXPECT_NE(numbers(1, 0), numbers(2, 0));
  EXPECT_NE(numbers(1, 1), numbers(2, 0));
}

}  // namespace epoch_order_test
}  // namespace ferry::trainer
