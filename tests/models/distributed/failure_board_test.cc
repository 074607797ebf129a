#include "models/distributed/failure_board.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "models/distributed/world.h"

namespace ferry::models {
namespace failure_board_test {

// A store whose owner has been stopped, or has gone.
class TroubledStore : public c10d::HashStore {
 public:
  bool check(const std::vector<std::string>& keys) override {
    if (is_gone) throw std::runtime_error("connection reset by peer");
    while (is_stopped) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return HashStore::check(keys);
  }
  std::atomic<bool> is_stopped = false, is_gone = false;
};

TEST(FailureBoard, AStoreThatIsSlowToAnswerIsNoFailure) {
  const auto store = c10::make_intrusive<TroubledStore>();
  store->is_stopped = true;
  EXPECT_FALSE(failure_announced(store, 1));
  store->is_stopped = false;
  EXPECT_FALSE(failure_announced(store, 1));
  announce_failure(World({}, 0, 2, store), Error(ErrorKind::kIo, "the disk is full"));
  EXPECT_TRUE(failure_announced(store, 1));
}

TEST(FailureBoard, AStoreThatIsGoneIsAFailure) {
  const auto store = c10::make_intrusive<TroubledStore>();
  store->is_gone = true;
  EXPECT_TRUE(failure_announced(store, 1));
}

TEST(FailureBoard, AFailureConcernsTheRanksThatItIsLimitedTo) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const World one({}, 2, 4, store), other({}, 0, 4, store);
  limit_failure(one, {2, 3});
  announce_failure(one, Error(ErrorKind::kIo, "the disk is full"));
  EXPECT_TRUE(failure_announced(store, 3));
  EXPECT_FALSE(failure_announced(store, 0));
  announce_failure(other, Error(ErrorKind::kIo, "the disk is full"));
  EXPECT_TRUE(failure_announced(store, 1));
}

TEST(FailureBoard, TellsTheContextAndTheHint) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Error error(ErrorKind::kIo, "the disk is full", "free some of it");
  error.add_context("saving step 3");
  announce_failure(World({}, 0, 2, store), error);
  const auto said = missing_ranks(store, "meeting", {0}, 1);
  ASSERT_EQ(said.size(), 1U);
  EXPECT_EQ(said[0],
            "rank 0, which failed: the disk is full; while saving step 3; hint: free some of it");
}

}  // namespace failure_board_test
}  // namespace ferry::models
