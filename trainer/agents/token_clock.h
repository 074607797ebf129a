// Time in tokens: when sessions end, by a clock of an engine that has so many places, gives them to
// the sessions in their order, and draws a token for each place in each step. A partial rollout
// stops by it, so that neither the sessions that a step learns from, nor the token at which the
// others stop, depend on who draws tokens, and how fast.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace ferry::trainer {

class TokenClock {
 public:
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

  struct Session {
    std::int64_t tokens = 0;  // drawn since the clock began
    bool is_over = false;
  };

  // `places`: at least 1. A session that is over and has no tokens was so before the clock began.
  TokenClock(std::span<const Session> sessions, std::int64_t places);

  // The time up to which all is known; kNever if all sessions are over.
  std::int64_t known_until() const { return known_until_; }
  // It is kNever of a session that is not over. An end behind known_until() may become later.
  std::int64_t end(std::size_t session) const { return ends_[session]; }
  // The tokens that a session has at a time, which is not behind known_until().
  std::int64_t tokens_at(std::size_t session, std::int64_t time) const;

 private:
  std::vector<std::int64_t> starts_, ends_;
  std::int64_t known_until_ = kNever;
};

}  // namespace ferry::trainer
