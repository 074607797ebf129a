#include "rollout/text/regex/regex.h"

#include "distckpt/base/error.h"
#include "rollout/text/regex/regex_tree.h"

namespace ferry::rollout::text {
namespace {

constexpr std::size_t kMostSteps = 10'000'000;  // of one match, as in Oniguruma
constexpr std::size_t kLongestProgram = 20'000;

std::bitset<257> first_bytes(const CodePointSet& set) {
  const auto lead = [](char32_t c) -> std::size_t {
    if (c < 0x80) return c;
    if (c < 0x800) return 0xC0 | c >> 6;
    return c < 0x10000 ? 0xE0 | c >> 12 : 0xF0 | c >> 18;
  };
  std::bitset<257> bytes;
  for (const auto& range : set.ranges()) {
    for (auto byte = lead(range.first); byte <= lead(range.last); ++byte) bytes.set(byte);
  }
  return bytes;
}

}  // namespace

// Writes a tree as a sequence of instructions, and then the bytes that each can begin with.
class RegexCompiler {
 public:
  using Kind = RegexNode::Kind;
  using Op = Regex::Op;

  explicit RegexCompiler(Regex& regex) : regex_(regex) {}

  void compile(const RegexNode& tree) {
    emit(tree);
    add({.op = Op::kAccept});
    std::vector<bool> known(regex_.program_.size());
    for (std::uint32_t pc = 0; pc < regex_.program_.size(); ++pc) find_first(pc, known);
  }

 private:
  std::uint32_t here() const { return static_cast<std::uint32_t>(regex_.program_.size()); }

  std::uint32_t add(Regex::Instruction instruction) {
    require(here() < kLongestProgram, ErrorKind::kUsage,
            "regular expression {}: longer than {} instructions", regex_.pattern_, kLongestProgram);
    regex_.program_.push_back(instruction);
    return here() - 1;
  }
  std::uint32_t add_set(const CodePointSet& set) {
    regex_.sets_.push_back(set);
    return static_cast<std::uint32_t>(regex_.sets_.size() - 1);
  }
  void point_here(std::uint32_t pc) { regex_.program_[pc].argument = here(); }

  void emit(const RegexNode& node) {
    switch (node.kind) {
      case Kind::kSet: {
        const auto& ranges = node.set.ranges();
        if (ranges.size() == 1 && ranges[0].first == ranges[0].last && ranges[0].first < 0x80) {
          add({.op = Op::kByte, .argument = ranges[0].first});
        } else {
          add({.op = Op::kSet, .argument = add_set(node.set)});
        }
        break;
      }
      case Kind::kSequence:
        for (const auto& child : node.children) emit(child);
        break;
      case Kind::kChoice:
        emit_choice(node.children);
        break;
      case Kind::kRepeat:
        emit_repeat(node);
        break;
      case Kind::kLookAhead:
        emit_enclosed(Op::kLookAhead, node.children[0]);
        break;
      case Kind::kLookAheadNot:
        emit_enclosed(Op::kLookAheadNot, node.children[0]);
        break;
      case Kind::kAtomic:
        emit_enclosed(Op::kAtomic, node.children[0]);
        break;
      case Kind::kLineBegin:
        add({.op = Op::kLineBegin});
        break;
      case Kind::kLineEnd:
        add({.op = Op::kLineEnd});
        break;
      case Kind::kTextBegin:
        add({.op = Op::kTextBegin});
        break;
      case Kind::kTextEnd:
        add({.op = Op::kTextEnd});
        break;
    }
  }

  void emit_choice(const std::vector<RegexNode>& children) {
    std::vector<std::uint32_t> jumps;
    for (std::size_t i = 0; i < children.size(); ++i) {
      const bool last = i + 1 == children.size();
      const auto split = last ? 0 : add({.op = Op::kSplit});
      emit(children[i]);
      if (last) break;
      jumps.push_back(add({.op = Op::kJump}));
      point_here(split);
    }
    for (const auto jump : jumps) point_here(jump);
  }

  void emit_enclosed(Op op, const RegexNode& child) {
    const auto begin = add({.op = op});
    emit(child);
    add({.op = Op::kAccept});
    point_here(begin);
  }

  void emit_repeat(const RegexNode& node) {
    const auto& child = node.children.front();
    if (child.kind == Kind::kSet) {
      const auto op = node.greed == RegexNode::Greed::kGreedy ? Op::kRepeat
                      : node.greed == RegexNode::Greed::kLazy ? Op::kLazy
                                                              : Op::kAtomicRepeat;
      add({.op = op, .argument = add_set(child.set), .min = node.min, .max = node.max});
      return;
    }
    const bool possessive = node.greed == RegexNode::Greed::kPossessive;
    const auto atomic = possessive ? add({.op = Op::kAtomic}) : 0;
    for (std::uint32_t i = 0; i < node.min; ++i) emit(child);
    const bool lazy = node.greed == RegexNode::Greed::kLazy;
    if (node.max == RegexNode::kUnbounded) {
      const auto loop = here();
      const auto leave = begin_optional(lazy);
      emit(child);
      add({.op = Op::kJump, .argument = loop});
      point_here(leave);
    } else {
      std::vector<std::uint32_t> leaves;
      for (auto i = node.min; i < node.max; ++i) {
        leaves.push_back(begin_optional(lazy));
        emit(child);
      }
      for (const auto leave : leaves) point_here(leave);
    }
    if (!possessive) return;
    add({.op = Op::kAccept});
    point_here(atomic);
  }

  // Begins a part that may be skipped. Returns the instruction whose argument is the place behind
  // it.
  std::uint32_t begin_optional(bool lazy) {
    const auto split = add({.op = Op::kSplit});
    if (!lazy) return split;
    const auto leave = add({.op = Op::kJump});
    point_here(split);
    return leave;
  }

  // The recursion ends, because a loop returns only after a character; `known` saves repeated work.
  const Regex::FirstBytes& find_first(std::uint32_t pc, std::vector<bool>& known) {
    auto& instruction = regex_.program_[pc];
    if (known[pc]) return instruction.first;
    auto first = Regex::FirstBytes();
    switch (instruction.op) {
      case Op::kByte:
        first.set(instruction.argument);
        break;
      case Op::kSet:
        first = first_bytes(regex_.sets_[instruction.argument]);
        break;
      case Op::kRepeat:
      case Op::kLazy:
      case Op::kAtomicRepeat:
        first = first_bytes(regex_.sets_[instruction.argument]);
        if (instruction.min == 0) first |= find_first(pc + 1, known);
        break;
      case Op::kSplit:
        first = find_first(pc + 1, known) | find_first(instruction.argument, known);
        break;
      case Op::kJump:
      case Op::kLookAhead:
      case Op::kLookAheadNot:
        first = find_first(instruction.argument, known);
        break;
      case Op::kAtomic:  // an empty one adds all bytes, by its kAccept
      case Op::kLineBegin:
      case Op::kLineEnd:
      case Op::kTextBegin:
      case Op::kTextEnd:
        first = find_first(pc + 1, known);
        break;
      case Op::kAccept:
        first.set();
        break;
    }
    known[pc] = true;
    instruction.first = first;
    return instruction.first;
  }

  Regex& regex_;
};

Regex::Regex(std::string_view pattern) : pattern_(pattern) {
  RegexCompiler(*this).compile(parse_regex(pattern));
}

std::optional<Match> Regex::find(std::string_view text, std::size_t from, Stack& stack) const {
  for (auto begin = from; begin <= text.size();) {
    if (can_begin(0, text, begin)) {
      std::size_t steps = 0;
      const auto end = match(text, 0, begin, stack, steps);
      if (end) return Match{.begin = begin, .end = *end};
    }
    begin += begin < text.size() ? utf8_length(text[begin]) : 1;
  }
  return std::nullopt;
}

std::optional<std::size_t> Regex::match(std::string_view text,
                                        std::uint32_t pc,
                                        std::size_t at,
                                        Stack& stack,
                                        std::size_t& steps) const {
  const auto bottom = stack.size();
  // Returns to the last choice that is left. False if there is none.
  const auto back = [&] {
    while (stack.size() > bottom) {
      require(++steps <= kMostSteps, ErrorKind::kUsage,
              "regular expression {}: takes more than {} steps", pattern_, kMostSteps);
      auto& frame = stack.back();
      pc = frame.pc;
      at = frame.at;
      if (frame.lazy) {  // takes one more character and continues behind it
        const auto& repeat = program_[pc];
        if (at < text.size() && frame.least > 0 &&
            sets_[repeat.argument].contains(next_code_point(text, frame.at))) {
          at = frame.at;
          --frame.least;
          ++pc;
          return true;
        }
        stack.pop_back();
        continue;
      }
      if (at > frame.least) {
        frame.at = previous_boundary(text, at);
      } else {
        stack.pop_back();
      }
      if (can_begin(pc, text, at)) return true;
    }
    return false;
  };
  while (true) {
    const auto& instruction = program_[pc];
    bool ok = true;
    switch (instruction.op) {
      case Op::kByte:
        ok = at < text.size() && static_cast<unsigned char>(text[at]) == instruction.argument;
        ++at;
        break;
      case Op::kSet:
        ok = at < text.size() && sets_[instruction.argument].contains(next_code_point(text, at));
        break;
      case Op::kRepeat:
      case Op::kAtomicRepeat:
      case Op::kLazy: {
        const auto& set = sets_[instruction.argument];
        const auto most = instruction.op == Op::kLazy ? instruction.min : instruction.max;
        auto least = at;
        std::uint32_t count = 0;
        for (; count < most && at < text.size(); ++count) {
          auto behind = at;
          if (!set.contains(next_code_point(text, behind))) break;
          at = behind;
          if (count < instruction.min) least = at;
        }
        ok = count >= instruction.min;
        if (!ok) break;
        if (instruction.op == Op::kLazy && instruction.max > instruction.min) {
          const bool unbounded = instruction.max == RegexNode::kUnbounded;
          stack.push_back({.pc = pc,
                           .at = at,
                           .least = unbounded ? static_cast<std::size_t>(-1)
                                              : instruction.max - instruction.min,
                           .lazy = true});
        } else if (instruction.op == Op::kRepeat && at > least) {
          stack.push_back({.pc = pc + 1, .at = previous_boundary(text, at), .least = least});
        }
        break;
      }
      case Op::kSplit:
        if (can_begin(pc + 1, text, at)) {
          if (can_begin(instruction.argument, text, at)) {
            stack.push_back({.pc = instruction.argument, .at = at, .least = at});
          }
          break;
        }
        pc = instruction.argument;
        continue;
      case Op::kJump:
        pc = instruction.argument;
        continue;
      case Op::kLookAhead:
      case Op::kLookAheadNot:
        ok =
            match(text, pc + 1, at, stack, steps).has_value() == (instruction.op == Op::kLookAhead);
        if (!ok) break;
        pc = instruction.argument;
        continue;
      case Op::kAtomic: {
        const auto end = match(text, pc + 1, at, stack, steps);
        ok = end.has_value();
        if (!ok) break;
        at = *end;
        pc = instruction.argument;
        continue;
      }
      case Op::kLineBegin:
        ok = at == 0 || (text[at - 1] == '\n' && at < text.size());
        break;
      case Op::kLineEnd:
        ok = at == text.size() || text[at] == '\n';
        break;
      case Op::kTextBegin:
        ok = at == 0;
        break;
      case Op::kTextEnd:
        ok = at == text.size();
        break;
      case Op::kAccept:
        stack.resize(bottom);
        return at;
    }
    if (ok) {
      ++pc;
    } else if (!back()) {
      return std::nullopt;
    }
  }
}

}  // namespace ferry::rollout::text
