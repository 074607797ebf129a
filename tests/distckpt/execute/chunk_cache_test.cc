#include "distckpt/execute/chunk_cache.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

namespace ferry::distckpt {
namespace chunk_cache_test {

DecodedChunk chunk_of(std::int64_t size, int value) {
  auto chunk = DecodedChunk::make(size);
  std::ranges::fill(chunk.bytes(), static_cast<std::byte>(value));
  return chunk;
}

TEST(ChunkCache, LoadsAChunkOnceForAllThreads) {
  ChunkCache cache(1 << 20);
  std::atomic<int> loads = 0;
  std::vector<std::jthread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (StorageId id = 0; id < 100; ++id) {
        const auto chunk = cache.get(id, [&] {
          ++loads;
          return chunk_of(100, static_cast<int>(id));
        });
        EXPECT_EQ(chunk.bytes()[99], static_cast<std::byte>(id));
      }
    });
  }
  threads.clear();
  EXPECT_EQ(loads, 100);
  EXPECT_EQ(cache.num_loads(), 100);
}

TEST(ChunkCache, ForgetsTheChunkThatWasUsedLongestAgo) {
  ChunkCache cache(250);
  const auto get = [&](StorageId id) { cache.get(id, [&] { return chunk_of(100, 0); }); };
  get(0);
  get(1);
  get(0);
  get(2);  // 1 has to go
  EXPECT_EQ(cache.num_loads(), 3);
  get(0);
  get(2);
  EXPECT_EQ(cache.num_loads(), 3);
  get(1);
  EXPECT_EQ(cache.num_loads(), 4);
}

TEST(ChunkCache, AChunkLargerThanItIsHandedOutAllTheSame) {
  ChunkCache cache(10);
  EXPECT_EQ(cache.get(0, [] { return chunk_of(100, 7); }).bytes()[99], std::byte{7});
  EXPECT_EQ(cache.get(1, [] { return chunk_of(100, 8); }).bytes()[0], std::byte{8});
}

TEST(ChunkCache, TriesAgainWhatFailed) {
  ChunkCache cache(1000);
  EXPECT_THROW(cache.get(0, []() -> DecodedChunk { throw std::runtime_error("no"); }),
               std::runtime_error);
  EXPECT_EQ(cache.get(0, [] { return chunk_of(10, 1); }).size, 10);
}

}  // namespace chunk_cache_test
}  // namespace ferry::distckpt
