#include "rollout/grammar/program.h"

#include <algorithm>
#include <utility>

#include "distckpt/base/error.h"

namespace ferry::rollout::grammar {
namespace {

using Kind = Expression::Kind;
using Node = Program::Node;

constexpr std::size_t kMostNodes = std::size_t{1} << 18;

class Builder {
 public:
  explicit Builder(const Rules& rules) {
    for (std::size_t i = 0; i < rules.all().size(); ++i) {
      program_.rules.push_back({.begin = node(), .end = node()});
      program_.nodes.back().is_end = true;
    }
    for (std::size_t i = 0; i < rules.all().size(); ++i)
      add(*rules.all()[i], program_.rules[i].begin, program_.rules[i].end);
  }
  Program take() { return std::move(program_); }

 private:
  std::uint32_t node() {
    require(program_.nodes.size() < kMostNodes, ErrorKind::kUsage,
            "the grammar is too large: it has more than {} places", kMostNodes);
    program_.nodes.emplace_back();
    return static_cast<std::uint32_t>(program_.nodes.size() - 1);
  }
  void edge(std::uint32_t from, std::uint8_t first, std::uint8_t last, std::uint32_t to) {
    program_.nodes[from].edges.push_back({.first = first, .last = last, .to = to});
  }
  void jump(std::uint32_t from, std::uint32_t to) { program_.nodes[from].jumps.push_back(to); }

  // Ways from one node to another. No way leads back to `from`, so that choices can share it.
  void add(const Expression& one, std::uint32_t from, std::uint32_t to) {
    switch (one.kind) {
      case Kind::kBytes:
        return edge(from, one.first, one.last, to);
      case Kind::kLiteral:
        return add_literal(one.text, from, to);
      case Kind::kSequence:
        for (std::size_t i = 0; i + 1 < one.children.size(); ++i) {
          const auto next = node();
          add(*one.children[i], from, next);
          from = next;
        }
        return one.children.empty() ? jump(from, to) : add(*one.children.back(), from, to);
      case Kind::kChoice:
        for (const auto& child : one.children) add(*child, from, to);
        return;
      case Kind::kRepeat:
        return add_repeat(one, from, to);
      case Kind::kRule:
        program_.nodes[from].calls.push_back({.rule = one.min, .then = to});
        return;
    }
  }

  void add_literal(std::string_view text, std::uint32_t from, std::uint32_t to) {
    for (std::size_t i = 0; i < text.size(); ++i) {
      const auto next = i + 1 == text.size() ? to : node();
      const auto byte = static_cast<std::uint8_t>(text[i]);
      edge(from, byte, byte, next);
      from = next;
    }
    if (text.empty()) jump(from, to);
  }

  void add_repeat(const Expression& one, std::uint32_t from, std::uint32_t to) {
    const auto& child = *one.children.front();
    const auto again = [&] {
      const auto next = node();
      add(child, from, next);
      from = next;
    };
    for (std::uint32_t i = 0; i < one.min; ++i) again();
    if (one.max == Expression::kUnbounded) {
      const auto loop = node();
      jump(from, loop);
      add(child, loop, loop);
      return jump(loop, to);
    }
    for (auto i = one.min; i < one.max; ++i) {
      jump(from, to);
      again();
    }
    jump(from, to);
  }

  Program program_;
};

// The nodes from which the end of their rule can be reached.
std::vector<bool> live_nodes(const Program& program) {
  const auto count = program.nodes.size();
  std::vector<std::vector<std::uint32_t>> before(count);  // by edge or jump
  std::vector<std::vector<std::pair<std::uint32_t, std::uint32_t>>> calls(count);  // (node, rule)
  for (std::uint32_t i = 0; i < count; ++i) {
    for (const auto& edge : program.nodes[i].edges) before[edge.to].push_back(i);
    for (const auto to : program.nodes[i].jumps) before[to].push_back(i);
    for (const auto& call : program.nodes[i].calls) calls[call.then].push_back({i, call.rule});
  }
  std::vector<std::int64_t> rule_of_begin(count, -1);
  for (std::size_t i = 0; i < program.rules.size(); ++i)
    rule_of_begin[program.rules[i].begin] = static_cast<std::int64_t>(i);
  std::vector<bool> live(count, false), is_possible(program.rules.size(), false);
  std::vector<std::vector<std::uint32_t>> waiting(program.rules.size());
  std::vector<std::uint32_t> work;
  const auto mark = [&](std::uint32_t i) {
    if (live[i]) return;
    live[i] = true;
    work.push_back(i);
  };
  for (const auto& rule : program.rules) mark(rule.end);
  while (!work.empty()) {
    const auto i = work.back();
    work.pop_back();
    for (const auto one : before[i]) mark(one);
    for (const auto& [from, rule] : calls[i]) {
      if (is_possible[rule])
        mark(from);
      else
        waiting[rule].push_back(from);
    }
    if (const auto rule = rule_of_begin[i]; rule >= 0) {
      is_possible[static_cast<std::size_t>(rule)] = true;
      for (const auto from : waiting[static_cast<std::size_t>(rule)]) mark(from);
    }
  }
  return live;
}

void cut_off_dead(Program& program) {
  const auto live = live_nodes(program);
  require(live[program.rules[0].begin], ErrorKind::kUsage, "no text fits");
  for (auto& node : program.nodes) {
    std::erase_if(node.edges, [&](const auto& edge) { return !live[edge.to]; });
    std::erase_if(node.jumps, [&](auto to) { return !live[to]; });
    std::erase_if(node.calls, [&](const auto& call) {
      return !live[call.then] || !live[program.rules[call.rule].begin];
    });
  }
}

// Calls visit(node) for the nodes of a rule that are reached before anything is read.
template <typename Visit>
void for_each_at_begin(const Program& program,
                       std::uint32_t rule,
                       const std::vector<bool>& can_be_empty,
                       std::vector<std::uint32_t>& seen,
                       Visit&& visit) {
  std::vector<std::uint32_t> work{program.rules[rule].begin};
  const auto mark = rule + 1;
  const auto reach = [&](std::uint32_t i) {
    if (std::exchange(seen[i], mark) != mark) work.push_back(i);
  };
  seen[work[0]] = mark;
  while (!work.empty()) {
    const auto i = work.back();
    work.pop_back();
    visit(program.nodes[i]);
    for (const auto to : program.nodes[i].jumps) reach(to);
    for (const auto& call : program.nodes[i].calls)
      if (can_be_empty[call.rule]) reach(call.then);
  }
}

std::vector<bool> empty_rules(const Program& program) {
  std::vector<bool> can_be_empty(program.rules.size(), false);
  for (bool changed = true; std::exchange(changed, false);) {
    std::vector<std::uint32_t> seen(program.nodes.size(), 0);
    for (std::uint32_t rule = 0; rule < program.rules.size(); ++rule) {
      if (can_be_empty[rule]) continue;
      bool ends = false;
      for_each_at_begin(program, rule, can_be_empty, seen,
                        [&](const Node& node) { ends = ends || node.is_end; });
      if (!ends) continue;
      can_be_empty[rule] = true;
      changed = true;
    }
  }
  return can_be_empty;
}

// Such a rule would be entered again and again without an end.
void refuse_left_recursion(const Program& program) {
  const auto can_be_empty = empty_rules(program);
  const auto count = program.rules.size();
  std::vector<std::uint32_t> seen(program.nodes.size(), 0);
  std::vector<std::vector<std::uint32_t>> first(count);
  std::vector<std::size_t> uses(count, 0);
  for (std::uint32_t rule = 0; rule < count; ++rule) {
    for_each_at_begin(program, rule, can_be_empty, seen, [&](const Node& node) {
      for (const auto& call : node.calls) first[rule].push_back(call.rule);
    });
    for (const auto one : first[rule]) ++uses[one];
  }
  std::vector<std::uint32_t> free;  // rules that no remaining one begins with
  for (std::uint32_t rule = 0; rule < count; ++rule)
    if (uses[rule] == 0) free.push_back(rule);
  std::size_t removed = 0;
  for (; !free.empty(); ++removed) {
    const auto rule = free.back();
    free.pop_back();
    for (const auto one : first[rule])
      if (--uses[one] == 0) free.push_back(one);
  }
  require(removed == count, ErrorKind::kUsage, "a part of it begins with itself");
}

void find_returns(Program& program) {
  for (std::size_t i = 0; i < program.nodes.size(); ++i) {
    const auto* node = &program.nodes[i];
    std::size_t steps = 0;
    while (!node->is_end && node->edges.empty() && node->calls.empty() && node->jumps.size() == 1 &&
           ++steps < 8)
      node = &program.nodes[node->jumps[0]];
    program.nodes[i].only_returns = node->is_end;
  }
}

}  // namespace

Program make_program(const Rules& rules) {
  auto program = Builder(rules).take();
  cut_off_dead(program);
  refuse_left_recursion(program);
  find_returns(program);
  return program;
}

}  // namespace ferry::rollout::grammar
