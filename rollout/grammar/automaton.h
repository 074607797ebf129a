// A program run over bytes. A state is the set of all places in the grammar where a text may be,
// each with the calls that it returns to; states are numbered, and made when they are reached, with
// where each byte leads. Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <unordered_map>
#include <vector>

#include "rollout/grammar/program.h"

namespace ferry::rollout::grammar {

class Automaton {
 public:
  using State = std::int32_t;
  static constexpr State kDead = -1;  // no text goes on from here

  // Grammars exist whose states are more than any memory holds. Work counts the places that are
  // looked at to make states.
  struct Limits {
    std::size_t work = std::numeric_limits<std::size_t>::max();   // from now on
    std::size_t bytes = std::numeric_limits<std::size_t>::max();  // in all
  };

  explicit Automaton(Program program);

  // Replaces the limits. Beyond them next() throws Error(kUsage), and what was found stays.
  void limit(Limits limits) { limits_ = limits; }
  // The work that is left of the limit.
  std::size_t work_left() const { return limits_.work; }
  std::size_t num_bytes() const;  // of memory, about

  State start() const { return start_; }
  State next(State state, std::uint8_t byte) {
    const auto row = states_[static_cast<std::size_t>(state)].row;
    return next_[static_cast<std::size_t>(row == kNoRow ? expand(state) : row)][byte];
  }
  // True if the text may end here.
  bool accepts(State state) const { return states_[static_cast<std::size_t>(state)].accepts; }
  // True if the text may go on.
  bool continues(State state) const {
    return states_[static_cast<std::size_t>(state)].num_places != 0;
  }

 private:
  static constexpr std::uint32_t kNoFrame = 0;
  static constexpr std::int32_t kNoRow = -1;
  struct Frame {  // a call under way
    std::uint32_t then = 0;
    std::uint32_t outer = kNoFrame;
  };
  // A node that has edges, and the call that it is in: node << 32 | frame.
  using Place = std::uint64_t;
  struct StateData {
    std::size_t first_place = 0;  // of places_
    std::uint32_t num_places = 0;
    std::int32_t row = kNoRow;  // of next_, once it is needed
    bool accepts = false;
  };

  std::int32_t expand(State state);
  State close(std::vector<Place> work);
  std::uint32_t frame(std::uint32_t then, std::uint32_t outer);
  std::span<const Place> places_of(const StateData& state) const;
  void charge(std::size_t work);

  Program program_;
  std::size_t program_bytes_ = 0;
  Limits limits_{};
  std::vector<Frame> frames_;
  std::unordered_map<std::uint64_t, std::uint32_t> frame_ids_;
  std::vector<StateData> states_;
  std::vector<Place> places_;  // of all states
  std::vector<std::array<State, 256>> next_;
  std::unordered_multimap<std::size_t, State> ids_;  // by hash
  State start_ = kDead;
};

}  // namespace ferry::rollout::grammar
