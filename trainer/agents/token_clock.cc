#include "trainer/agents/token_clock.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

namespace ferry::trainer {

TokenClock::TokenClock(std::span<const Session> sessions, std::int64_t places) {
  std::priority_queue<std::int64_t, std::vector<std::int64_t>, std::greater<>> free;
  for (const auto& session : sessions) {
    const bool was_over = session.is_over && session.tokens == 0;
    std::int64_t start = 0;
    if (!was_over && std::cmp_equal(free.size(), places)) {
      start = free.top();
      free.pop();
    }
    const auto last = start + session.tokens;
    starts_.push_back(start);
    ends_.push_back(session.is_over ? last : kNever);
    // A session that is not over draws one more, at least: none begins in its place before.
    if (!was_over) free.push(session.is_over ? last : last + 1);
    if (!session.is_over) known_until_ = std::min(known_until_, last);
  }
}

std::int64_t TokenClock::tokens_at(std::size_t session, std::int64_t time) const {
  return std::max<std::int64_t>(0, std::min(time, ends_[session]) - starts_[session]);
}

}  // namespace ferry::trainer
