// A program run over bytes. A state is the set of all places in the grammar where a text may be,
// each with the calls that it returns to; states are numbered, and made when they are reached, with
// where each byte leads. Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

#include "rollout/grammar/program.h"

namespace ferry::rollout::grammar {

class Automaton {
 public:
  using State = std::int32_t;
  static constexpr State kDead = -1;  // no text goes on from here

  explicit Automaton(Program program);

  State start() const { return start_; }
  State next(State state, std::uint8_t byte) {
    if (!states_[static_cast<std::size_t>(state)].is_expanded) expand(state);
    return next_[static_cast<std::size_t>(state)][byte];
  }
  // True if the text may end here.
  bool accepts(State state) const { return states_[static_cast<std::size_t>(state)].accepts; }
  // True if the text may go on.
  bool continues(State state) const {
    return !states_[static_cast<std::size_t>(state)].places.empty();
  }
  std::size_t num_states() const { return states_.size(); }

 private:
  static constexpr std::uint32_t kNoFrame = 0;
  struct Frame {  // a call under way
    std::uint32_t then = 0;
    std::uint32_t outer = kNoFrame;
  };
  // A node that has edges, and the call that it is in: node << 32 | frame.
  using Places = std::vector<std::uint64_t>;
  struct StateData {
    const Places& places;
    bool accepts = false;
    bool is_expanded = false;
  };

  void expand(State state);
  State state_of(const Places& places);
  State close(std::vector<std::uint64_t> work);
  std::uint32_t frame(std::uint32_t then, std::uint32_t outer);

  Program program_;
  std::vector<Frame> frames_;
  std::unordered_map<std::uint64_t, std::uint32_t> frame_ids_;
  std::vector<StateData> states_;
  std::vector<std::array<State, 256>> next_;
  std::map<std::pair<Places, bool>, State> ids_;
  State start_ = kDead;
};

}  // namespace ferry::rollout::grammar
