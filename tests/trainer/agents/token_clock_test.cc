// When sessions end by a clock that counts tokens.
#include "trainer/agents/token_clock.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ferry::trainer {
namespace token_clock_test {

using Sessions = std::vector<TokenClock::Session>;

TEST(TokenClock, GivesAPlaceThatGetsFreeToTheNextSession) {
  const TokenClock clock(Sessions{{3, true}, {5, true}, {4, true}, {1, true}}, 2);
  EXPECT_EQ(clock.end(0), 3);
  EXPECT_EQ(clock.end(1), 5);
  EXPECT_EQ(clock.end(2), 7);
  EXPECT_EQ(clock.end(3), 6);
  EXPECT_EQ(clock.known_until(), TokenClock::kNever);
  EXPECT_EQ(clock.tokens_at(2, 5), 2);
  EXPECT_EQ(clock.tokens_at(3, 5), 0);
  EXPECT_EQ(clock.tokens_at(0, 5), 3);
}

TEST(TokenClock, KnowsNothingBehindTheLeastOfASessionThatGoesOn) {
  const TokenClock clock(Sessions{{9, true}, {2, false}, {6, false}}, 3);
  EXPECT_EQ(clock.known_until(), 2);
  EXPECT_EQ(clock.end(1), TokenClock::kNever);
  EXPECT_EQ(clock.tokens_at(2, 2), 2);
}

TEST(TokenClock, GivesNoPlaceToSessionsThatWereOver) {
  const TokenClock clock(Sessions{{0, true}, {2, true}, {0, true}, {3, true}}, 1);
  EXPECT_EQ(clock.end(0), 0);
  EXPECT_EQ(clock.end(1), 2);
  EXPECT_EQ(clock.end(2), 0);
  EXPECT_EQ(clock.end(3), 5);
}

// The tokens of sessions come in some order: the clock never takes back what it knew.
TEST(TokenClock, NeverTakesBackWhatItKnew) {
  const std::vector<std::int64_t> lengths{7, 1, 4, 9, 2, 2, 6, 3};
  const auto clock_of = [&](const std::vector<std::int64_t>& drawn) {
    Sessions sessions;
    for (std::size_t i = 0; i < lengths.size(); ++i)
      sessions.push_back({drawn[i], drawn[i] == lengths[i]});
    return TokenClock(sessions, 3);
  };
  const auto last = clock_of(lengths);
  std::vector<std::int64_t> drawn(lengths.size(), 0);
  for (std::size_t turn = 0; turn < 200; ++turn) {
    const auto clock = clock_of(drawn);
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      if (std::min(clock.end(i), last.end(i)) <= clock.known_until()) {
        EXPECT_EQ(clock.end(i), last.end(i));
      }
      if (clock.known_until() == TokenClock::kNever) continue;
      EXPECT_EQ(clock.tokens_at(i, clock.known_until()), last.tokens_at(i, clock.known_until()));
    }
    const auto one = turn * 5 % lengths.size();
    drawn[one] = std::min(lengths[one], drawn[one] + 1);
  }
}

}  // namespace token_clock_test
}  // namespace ferry::trainer
