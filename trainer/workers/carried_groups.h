// The sessions of a partial rollout, which go from one run to the next until they are learned from.
// A group is the answers to a prompt, which follow each other; the oldest groups come first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <vector>

#include "trainer/agents/session.h"
#include "trainer/agents/token_clock.h"

namespace ferry::trainer {

class CarriedGroups {
 public:
  // `sessions` outlive this, in groups of n. A run is to finish `wanted` of them, `old` among them:
  // numbers of groups. Throws Error(kBug) if there are not as many.
  CarriedGroups(std::vector<Session>& sessions,
                std::size_t n,
                std::size_t wanted,
                std::set<std::size_t> old);

  // The old groups are over, and with them as many as are wanted.
  bool are_finished() const;
  std::size_t num_over() const;

  // For sessions of one turn: the run ends by a TokenClock that begins now. `is_over`: told of each
  // session that is over by the clock, once.
  void keep_time(std::int64_t places, std::function<void(std::size_t session)> is_over);
  // True if the clock says when the groups are finished. Called behind each step.
  bool know_their_end();
  // Takes from the sessions what they have drawn behind that time.
  void cut();

  // The finished groups, the oldest first; the others stay in `sessions`.
  std::vector<Session> take();

 private:
  bool is_over(std::size_t group) const;
  std::set<std::size_t> chosen() const;
  TokenClock clock() const;
  std::optional<std::int64_t> end(const TokenClock& clock) const;
  void tell(const TokenClock& clock, std::int64_t until);

  std::vector<Session>& sessions_;
  std::size_t n_;
  std::size_t wanted_;
  std::set<std::size_t> old_;
  // State of the clock:
  std::int64_t places_ = 1;
  std::function<void(std::size_t)> told_of_{};
  std::vector<std::size_t> begun_{};  // tokens that sessions had
  std::vector<bool> told_{};
  std::size_t num_seen_ = 0;  // sessions that were over, when they were last told of
};

}  // namespace ferry::trainer
