#include "distckpt/execute/object_pool.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace ferry::distckpt {
namespace object_pool_test {

TEST(ObjectPool, GivesEachUserItsOwn) {
  ObjectPool<int> pool;
  pool.with([&](int& first) { pool.with([&](int& second) { EXPECT_NE(&first, &second); }); });
}

TEST(ObjectPool, KeepsWhatWasUsed) {
  ObjectPool<int> pool;
  pool.with([](int& object) { object = 7; });
  EXPECT_EQ(pool.with([](const int& object) { return object; }), 7);
}

TEST(ObjectPool, DropsWhatThrew) {
  ObjectPool<int> pool;
  EXPECT_THROW(pool.with([](int& object) {
    object = 7;
    throw std::runtime_error("broken");
  }),
               std::runtime_error);
  EXPECT_EQ(pool.with([](const int& object) { return object; }), 0);
}

}  // namespace object_pool_test
}  // namespace ferry::distckpt
