#include "rollout/text/regex/linear_regex.h"

#include <utility>

#include "distckpt/base/error.h"

namespace ferry::rollout::text {

using Node = RegexNode::Kind;

LinearRegex::LinearRegex(std::string_view pattern) : pattern_(pattern) {
  const auto tree = parse_regex(pattern);
  const auto accept = add(Kind::kAccept, 0);
  const auto first = compile(tree, accept);
  add(Kind::kSplit, first, first);  // the last state is where a match begins
  pattern_ = {};
}

std::uint32_t LinearRegex::add(Kind kind, std::uint32_t next, std::uint32_t other) {
  require(states_.size() < kMostStates, ErrorKind::kUsage,
          "regular expression {}: more than {} characters with repetitions spelled out", pattern_,
          kMostStates);
  states_.push_back({.kind = kind, .next = next, .other = other});
  return static_cast<std::uint32_t>(states_.size() - 1);
}

std::uint32_t LinearRegex::compile(const RegexNode& node, std::uint32_t next) {
  switch (node.kind) {
    case Node::kSet:
      sets_.push_back(node.set);
      return add(Kind::kSet, next, static_cast<std::uint32_t>(sets_.size() - 1));
    case Node::kSequence:
      for (auto child = node.children.rbegin(); child != node.children.rend(); ++child)
        next = compile(*child, next);
      return next;
    case Node::kChoice: {
      auto first = compile(node.children.back(), next);
      for (std::size_t i = node.children.size() - 1; i-- > 0;)
        first = add(Kind::kSplit, compile(node.children[i], next), first);
      return first;
    }
    case Node::kRepeat:
      return compile_repeat(node, next);
    case Node::kLineBegin:
    case Node::kTextBegin:
      return add(Kind::kTextBegin, next);
    case Node::kLineEnd:
    case Node::kTextEnd:
      return add(Kind::kTextEnd, next);
    case Node::kLookAhead:
    case Node::kLookAheadNot: {
      require(!std::exchange(looks_ahead_, true), ErrorKind::kUsage,
              "regular expression {}: look-ahead inside look-ahead is not supported", pattern_);
      const auto inside = compile(node.children.front(), 0);
      looks_ahead_ = false;
      const bool wanted = node.kind == Node::kLookAhead;
      return add(wanted ? Kind::kLookAhead : Kind::kLookAheadNot, next, inside);
    }
    case Node::kAtomic:
      break;
  }
  fail(ErrorKind::kUsage, "regular expression {}: an atomic group is not supported", pattern_);
}

std::uint32_t LinearRegex::compile_repeat(const RegexNode& node, std::uint32_t next) {
  require(node.greed != RegexNode::Greed::kPossessive, ErrorKind::kUsage,
          "regular expression {}: a possessive repetition is not supported", pattern_);
  const auto& child = node.children.front();
  auto first = next;
  if (node.max == RegexNode::kUnbounded) {
    first = add(Kind::kSplit, next);
    const auto again = compile(child, first);
    states_[first].other = again;
  } else {
    for (auto i = node.min; i < node.max; ++i) {
      const auto before = states_.size();
      const auto once = compile(child, first);
      if (states_.size() == before) return next;  // nothing, however often
      first = add(Kind::kSplit, once, next);
    }
  }
  for (std::uint32_t i = 0; i < node.min; ++i) {
    const auto before = states_.size();
    first = compile(child, first);
    if (states_.size() == before) break;
  }
  return first;
}

bool LinearRegex::matches(std::string_view text) const {
  return is_valid_utf8(text) &&
         runs(static_cast<std::uint32_t>(states_.size() - 1), text, 0, /*whole=*/true);
}

// All states that the characters so far lead to, step by step: none is visited twice at a place.
bool LinearRegex::runs(std::uint32_t first,
                       std::string_view text,
                       std::size_t at,
                       bool whole) const {
  std::vector<std::size_t> visited_at(states_.size(), text.npos);
  std::vector<std::uint32_t> open{first}, sets;
  while (true) {
    bool accepted = false;
    sets.clear();
    while (!open.empty()) {
      const auto index = open.back();
      open.pop_back();
      if (std::exchange(visited_at[index], at) == at) continue;
      const auto& state = states_[index];
      switch (state.kind) {
        case Kind::kAccept:
          accepted = true;
          break;
        case Kind::kSet:
          sets.push_back(index);
          break;
        case Kind::kSplit:
          open.push_back(state.next);
          open.push_back(state.other);
          break;
        case Kind::kTextBegin:
          if (at == 0) open.push_back(state.next);
          break;
        case Kind::kTextEnd:
          if (at == text.size()) open.push_back(state.next);
          break;
        case Kind::kLookAhead:
        case Kind::kLookAheadNot:
          if (runs(state.other, text, at, /*whole=*/false) == (state.kind == Kind::kLookAhead))
            open.push_back(state.next);
          break;
      }
    }
    if (accepted && (!whole || at == text.size())) return true;
    if (at == text.size() || sets.empty()) return false;
    const auto c = next_code_point(text, at);
    for (const auto index : sets)
      if (sets_[states_[index].other].contains(c)) open.push_back(states_[index].next);
  }
}

}  // namespace ferry::rollout::text
