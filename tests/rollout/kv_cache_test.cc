#include "rollout/kv_cache.h"

#include <ATen/ATen.h>

#include "tests/rollout/tiny_engine.h"
#include "tests/support/expect.h"

namespace ferry::rollout {
namespace kv_cache_test {

class Cache : public TinyEngineTest {
 protected:
  // [tokens, groups, dim] of one number.
  at::Tensor rows(std::int64_t tokens, double value) const {
    return at::full({tokens, cache_.key(0).size(2), cache_.key(0).size(3)}, value,
                    cache_.key(0).options());
  }
  double key_at(std::int64_t layer, std::int64_t slot) const {
    return cache_.key(layer).flatten(0, 1)[slot][0][0].item<double>();
  }
  static at::Tensor slots(std::vector<std::int64_t> numbers) {
    return at::tensor(numbers, at::kLong);
  }

  KVCache cache_{model_, 3};
};

TEST_F(Cache, ABlockMoreIsKeptThanCounted) {
  EXPECT_EQ(cache_.num_blocks(), 3);
  EXPECT_EQ(cache_.key(0).size(0), 4);
  EXPECT_EQ(cache_.key(0).size(1), KVCache::kBlockSize);
}

TEST_F(Cache, BytesPerBlockAreThoseOfAllLayers) {
  std::size_t bytes = 0;
  for (const auto& [key, value] : cache_.layers()) bytes += key.nbytes() + value.nbytes();
  EXPECT_EQ(KVCache::bytes_per_block(model_) * 4, static_cast<std::int64_t>(bytes));
}

TEST_F(Cache, PartOfABlockTakesAWholeOne) {
  EXPECT_EQ(KVCache::blocks_of(0), 0);
  EXPECT_EQ(KVCache::blocks_of(64), 1);
  EXPECT_EQ(KVCache::blocks_of(65), 2);
}

TEST_F(Cache, RowsGoToTheirSlots) {
  cache_.store(1, slots({70, 2}), rows(2, 5), rows(2, 6));
  EXPECT_EQ(key_at(1, 70), 5);
  EXPECT_EQ(cache_.value(1).flatten(0, 1)[2][0][0].item<double>(), 6);
}

TEST_F(Cache, ALayerDoesNotTouchAnother) {
  cache_.store(1, slots({70}), rows(1, 5), rows(1, 6));
  EXPECT_EQ(key_at(0, 70), 0);
}

TEST_F(Cache, APaddingRowChangesNoBlock) {
  cache_.store(0, slots({-1}), rows(1, 5), rows(1, 6));
  EXPECT_EQ(cache_.key(0).narrow(0, 0, 3).count_nonzero().item<std::int64_t>(), 0);
}

TEST_F(Cache, ACopyLeavesTheOriginal) {
  cache_.store(0, slots({3}), rows(1, 5), rows(1, 6));
  cache_.copy(0, slots({3, 130}).view({2, 1}));
  EXPECT_EQ(key_at(0, 3), 5);
  EXPECT_EQ(key_at(0, 130), 5);
}

TEST_F(Cache, WhatIsReleasedIsForgotten) {
  cache_.store(0, slots({3}), rows(1, 5), rows(1, 6));
  cache_.release();
  EXPECT_TRUE(cache_.layers().empty());
  cache_.allocate();
  EXPECT_EQ(key_at(0, 3), 0);
}

}  // namespace kv_cache_test
}  // namespace ferry::rollout
