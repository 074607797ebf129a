#include "rollout/grammar/automaton.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace ferry::rollout::grammar {
namespace {

std::uint64_t place(std::uint32_t node, std::uint32_t frame) {
  return std::uint64_t{node} << 32 | frame;
}

}  // namespace

Automaton::Automaton(Program program) : program_(std::move(program)), frames_(1) {
  start_ = close({place(program_.rules[0].begin, kNoFrame)});
}

std::uint32_t Automaton::frame(std::uint32_t then, std::uint32_t outer) {
  const auto [found, is_new] =
      frame_ids_.try_emplace(place(then, outer), static_cast<std::uint32_t>(frames_.size()));
  if (is_new) frames_.push_back({.then = then, .outer = outer});
  return found->second;
}

// The state of all places that are reached from these before a byte is read.
Automaton::State Automaton::close(std::vector<std::uint64_t> work) {
  std::ranges::sort(work);
  work.erase(std::ranges::unique(work).begin(), work.end());
  std::unordered_set<std::uint64_t> seen(work.begin(), work.end());
  Places places;
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
  const auto [found, is_new] =
      ids_.try_emplace({std::move(places), accepts}, static_cast<State>(states_.size()));
  if (is_new) {
    states_.push_back({.places = found->first.first, .accepts = accepts});
    next_.emplace_back();
  }
  return found->second;
}

// Finds where each byte leads: bytes between two ends of edges lead to the same state.
void Automaton::expand(State state) {
  const auto index = static_cast<std::size_t>(state);
  const auto& places = states_[index].places;
  std::array<bool, 257> begins{};
  begins[0] = true;
  for (const auto one : places) {
    for (const auto& edge : program_.nodes[one >> 32].edges) {
      begins[edge.first] = true;
      begins[edge.last + std::size_t{1}] = true;
    }
  }
  std::array<State, 256> next{};
  State to = kDead;
  for (std::size_t byte = 0; byte < 256; ++byte) {
    if (begins[byte]) {
      std::vector<std::uint64_t> work;
      for (const auto one : places)
        for (const auto& edge : program_.nodes[one >> 32].edges)
          if (edge.first <= byte && byte <= edge.last)
            work.push_back(place(edge.to, static_cast<std::uint32_t>(one)));
      to = work.empty() ? kDead : close(std::move(work));
    }
    next[byte] = to;
  }
  next_[index] = next;
  states_[index].is_expanded = true;
}

}  // namespace ferry::rollout::grammar
