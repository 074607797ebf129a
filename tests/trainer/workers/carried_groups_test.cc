// The sessions of a partial rollout that are learned from, and the tokens at which others stop.
#include "trainer/workers/carried_groups.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"

namespace ferry::trainer {
namespace carried_groups_test {

// A session that draws tokens, up to its length.
void draw(Session& session, std::int64_t length) {
  session.response.push_back({.token_id = static_cast<std::int64_t>(session.response.size())});
  session.response_mask.push_back(1);
  session.global_steps.push_back(4);
  session.is_over = std::cmp_equal(session.response.size(), length);
  session.assistant_turns = session.is_over ? 1 : 0;
}

struct Outcome {
  std::vector<std::uint64_t> taken{};                         // seeds
  std::vector<std::pair<std::uint64_t, std::size_t>> left{};  // with their tokens
  std::vector<std::size_t> told{};
  bool operator==(const Outcome&) const = default;
};

// `next`: says which session draws a token next.
template <typename Next>
Outcome outcome_of(const std::vector<std::int64_t>& lengths, std::int64_t places, Next next) {
  std::vector<Session> sessions(lengths.size());
  for (std::size_t i = 0; i < sessions.size(); ++i) sessions[i].seed = i;
  Outcome outcome;
  CarriedGroups groups(sessions, 2, 2, {});
  groups.keep_time(places, [&](std::size_t i) { outcome.told.push_back(i); });
  while (!groups.know_their_end()) {
    const auto i = next(sessions);
    if (!sessions[i].is_over) draw(sessions[i], lengths[i]);
  }
  groups.cut();
  for (const auto& session : groups.take()) {
    outcome.taken.push_back(session.seed);
    EXPECT_TRUE(session.is_over);
    EXPECT_EQ(std::ssize(session.response), lengths[session.seed]);
  }
  for (const auto& session : sessions) {
    outcome.left.emplace_back(session.seed, session.response.size());
    EXPECT_EQ(session.response.size(), session.response_mask.size());
    EXPECT_EQ(session.response.size(), session.global_steps.size());
    EXPECT_EQ(session.is_over, std::cmp_equal(session.response.size(), lengths[session.seed]));
  }
  std::ranges::sort(outcome.told);
  return outcome;
}

const std::vector<std::int64_t> kLengths{9, 3, 2, 5, 4, 4, 1, 30};

TEST(CarriedGroups, AreTakenByTheTimeAtWhichTheyEnd) {
  // All have places: the groups of 4 and of 5 tokens are over first.
  std::size_t i = 0;
  const auto outcome = outcome_of(kLengths, 8, [&](const auto& all) { return i++ % all.size(); });
  EXPECT_EQ(outcome.taken, (std::vector<std::uint64_t>{2, 3, 4, 5}));
  EXPECT_EQ(outcome.left, (decltype(outcome.left){{0, 5}, {1, 3}, {6, 1}, {7, 5}}));
  EXPECT_EQ(outcome.told, (std::vector<std::size_t>{1, 2, 3, 4, 5, 6}));
}

// The same sessions end with the same tokens, whoever draws first and however fast.
TEST(CarriedGroups, DependOnNoOrderOfDraws) {
  for (const std::int64_t places : {1, 2, 3, 8}) {
    std::size_t turn = 0;
    const auto expected =
        outcome_of(kLengths, places, [&](const auto& all) { return turn++ % all.size(); });
    for (unsigned seed = 0; seed < 50; ++seed) {
      std::mt19937 random(seed);
      std::vector<std::size_t> order(kLengths.size());
      std::iota(order.begin(), order.end(), 0);
      std::ranges::shuffle(order, random);
      const auto outcome = outcome_of(kLengths, places, [&](const auto& all) {
        // Mostly one behind the other, in an order of its own.
        for (const auto i : order)
          if (!all[i].is_over && random() % 4 != 0) return i;
        return order[random() % order.size()];
      });
      EXPECT_EQ(outcome, expected) << "places " << places << ", seed " << seed;
    }
  }
}

TEST(CarriedGroups, FinishThoseThatAreOldFirst) {
  std::vector<Session> sessions(6);
  CarriedGroups groups(sessions, 2, 2, {2});
  for (std::size_t i = 0; i < 4; ++i) sessions[i].is_over = true;
  EXPECT_FALSE(groups.are_finished());
  sessions[4].is_over = sessions[5].is_over = true;
  EXPECT_TRUE(groups.are_finished());
  for (std::size_t i = 0; i < 6; ++i) sessions[i].seed = i;
  EXPECT_EQ(groups.take().back().seed, 5U);
  EXPECT_EQ(sessions.size(), 2U);
  EXPECT_EQ(sessions.front().seed, 2U);
}

TEST(CarriedGroups, AreNotMoreThanThereAre) {
  std::vector<Session> sessions(4);
  EXPECT_THROW(CarriedGroups(sessions, 2, 3, {}), Error);
}

}  // namespace carried_groups_test
}  // namespace ferry::trainer
