#include "rollout/grammar/automaton.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "distckpt/base/error.h"

namespace ferry::rollout::grammar {
namespace {

std::uint64_t place(std::uint32_t node, std::uint32_t frame) {
  return std::uint64_t{node} << 32 | frame;
}

// Memory of a program, about.
std::size_t bytes_of(const Program& program) {
  auto bytes = program.nodes.size() * sizeof(program.nodes[0]);
  for (const auto& node : program.nodes)
    bytes += node.edges.capacity() * sizeof(node.edges[0]) +
             node.jumps.capacity() * sizeof(node.jumps[0]) +
             node.calls.capacity() * sizeof(node.calls[0]);
  return bytes;
}

std::size_t hash_of(std::span<const std::uint64_t> places) {
  constexpr std::uint64_t kPrime = 0x9E3779B97F4A7C15;
  std::uint64_t hash = places.size();
  for (const auto one : places) {
    hash = (hash ^ one) * kPrime;
    hash ^= hash >> 32;
  }
  return hash;
}

}  // namespace

Automaton::Automaton(Program program)
    : program_(std::move(program)), program_bytes_(bytes_of(program_)), frames_(1) {
  start_ = close({place(program_.rules[0].begin, kNoFrame)});
}

std::size_t Automaton::num_bytes() const {
  constexpr std::size_t kEntry = 40;  // of a hash table, about
  return program_bytes_ + places_.size() * sizeof(Place) +
         states_.size() * (sizeof(StateData) + kEntry) + next_.size() * sizeof(next_[0]) +
         frames_.size() * (sizeof(Frame) + kEntry);
}

void Automaton::charge(std::size_t work) {
  require(work <= limits_.work && num_bytes() <= limits_.bytes, ErrorKind::kUsage,
          "the format is too large: a text can be at too many places of it at a time");
  limits_.work -= work;
}

std::span<const Automaton::Place> Automaton::places_of(const StateData& state) const {
  return std::span(places_).subspan(state.first_place, state.num_places);
}

std::uint32_t Automaton::frame(std::uint32_t then, std::uint32_t outer) {
  const auto [found, is_new] =
      frame_ids_.try_emplace(place(then, outer), static_cast<std::uint32_t>(frames_.size()));
  if (is_new) frames_.push_back({.then = then, .outer = outer});
  return found->second;
}

// The state of all places that are reached from these before a byte is read.
Automaton::State Automaton::close(std::vector<Place> work) {
  std::ranges::sort(work);
  work.erase(std::ranges::unique(work).begin(), work.end());
  std::unordered_set<Place> seen(work.begin(), work.end());
  std::vector<Place> places;
  bool accepts = false;
  const auto reach = [&](std::uint32_t node, std::uint32_t frame) {
    const auto one = place(node, frame);
    if (seen.insert(one).second) work.push_back(one);
  };
  while (!work.empty()) {
    const auto one = work.back();
    work.pop_back();
    const auto& node = program_.nodes[one >> 32];
    const auto at = static_cast<std::uint32_t>(one);
    if (!node.edges.empty()) places.push_back(one);
    for (const auto to : node.jumps) reach(to, at);
    for (const auto& call : node.calls) {
      const bool is_last = program_.nodes[call.then].only_returns;  // so that lists do not nest
      reach(program_.rules[call.rule].begin, is_last ? at : frame(call.then, at));
    }
    if (!node.is_end) continue;
    if (at == kNoFrame)
      accepts = true;
    else
      reach(frames_[at].then, frames_[at].outer);
  }
  if (places.empty() && !accepts) return kDead;
  std::ranges::sort(places);
  charge(seen.size());
  const auto hash = hash_of(places);
  for (auto [one, end] = ids_.equal_range(hash); one != end; ++one) {
    const auto& known = states_[static_cast<std::size_t>(one->second)];
    if (known.accepts == accepts && std::ranges::equal(places_of(known), places))
      return one->second;
  }
  const auto state = static_cast<State>(states_.size());
  ids_.emplace(hash, state);
  states_.push_back({.first_place = places_.size(),
                     .num_places = static_cast<std::uint32_t>(places.size()),
                     .accepts = accepts});
  places_.insert(places_.end(), places.begin(), places.end());
  return state;
}

// Finds where each byte leads: bytes between two ends of edges lead to the same state. Returns its
// row of next_.
std::int32_t Automaton::expand(State state) {
  const auto index = static_cast<std::size_t>(state);
  const auto now = places_of(states_[index]);
  const std::vector<Place> places(now.begin(), now.end());  // close() adds to places_
  std::array<bool, 257> begins{};
  begins[0] = true;
  std::size_t num_edges = 0;
  for (const auto one : places) {
    num_edges += program_.nodes[one >> 32].edges.size();
    for (const auto& edge : program_.nodes[one >> 32].edges) {
      begins[edge.first] = true;
      begins[edge.last + std::size_t{1}] = true;
    }
  }
  constexpr std::size_t kEdgesOfAPlace = 32;  // that are read in the time of one that is reached
  const auto num_begins = static_cast<std::size_t>(std::ranges::count(begins, true));
  charge(1 + num_begins * num_edges / kEdgesOfAPlace);
  std::array<State, 256> next{};
  State to = kDead;
  for (std::size_t byte = 0; byte < 256; ++byte) {
    if (begins[byte]) {
      std::vector<Place> work;
      for (const auto one : places)
        for (const auto& edge : program_.nodes[one >> 32].edges)
          if (edge.first <= byte && byte <= edge.last)
            work.push_back(place(edge.to, static_cast<std::uint32_t>(one)));
      to = work.empty() ? kDead : close(std::move(work));
    }
    next[byte] = to;
  }
  const auto row = static_cast<std::int32_t>(next_.size());
  next_.push_back(next);
  return states_[index].row = row;
}

}  // namespace ferry::rollout::grammar
