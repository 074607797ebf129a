#include <algorithm>
#include <string>
#include <utility>

#include "distckpt/base/error.h"
#include "rollout/text/regex/regex_tree.h"

namespace ferry::rollout::text {
namespace {

using Kind = RegexNode::Kind;
using Greed = RegexNode::Greed;

constexpr std::uint32_t kLargestCount = 1000;
constexpr int kDeepestNesting = 50;

CodePointSet single(char32_t c) {
  return CodePointSet({{c, c}});
}

bool is_ascii_letter(char32_t c) {
  return (c | 0x20) >= 'a' && (c | 0x20) <= 'z' && c < 0x80;
}

class Parser {
 public:
  Parser(std::string_view pattern, RegexSyntax syntax) : pattern_(pattern), syntax_(syntax) {}

  RegexNode parse() {
    require(is_valid_utf8(pattern_), ErrorKind::kUsage, "regular expression: is not UTF-8");
    auto tree = choice();
    refuse(at_ < pattern_.size(), "a ) without its (");
    return tree;
  }

 private:
  void refuse(bool wrong, std::string_view what) const {
    require(!wrong, ErrorKind::kUsage, "regular expression {}: {} at byte {} is not supported",
            pattern_, what, at_);
  }
  bool ended() const { return at_ >= pattern_.size(); }
  bool sees(std::string_view text) const { return pattern_.substr(at_).starts_with(text); }
  bool take(std::string_view text) {
    if (!sees(text)) return false;
    at_ += text.size();
    return true;
  }
  char32_t next() {
    refuse(ended(), "an end");
    return next_code_point(pattern_, at_);
  }

  RegexNode choice() {
    refuse(++depth_ > kDeepestNesting, "so deep a nesting");
    RegexNode node{.kind = Kind::kChoice};
    do {
      node.children.push_back(sequence());
    } while (take("|"));
    --depth_;
    if (node.children.size() > 1) return node;
    return std::move(node.children.front());
  }

  RegexNode sequence() {
    RegexNode node{.kind = Kind::kSequence};
    last_letter_ = 0;
    while (!ended() && !sees("|") && !sees(")")) {
      auto part = atom();
      while (quantifier(part)) {
      }
      node.children.push_back(std::move(part));
    }
    return node;
  }

  RegexNode atom() {
    const auto letter = std::exchange(last_letter_, 0);
    if (sees("(")) return group();
    if (sees("[")) return RegexNode{.kind = Kind::kSet, .set = bracket()};
    if (take("^")) return RegexNode{.kind = Kind::kLineBegin};
    if (take("$")) return RegexNode{.kind = Kind::kLineEnd};
    if (take("\\A")) return RegexNode{.kind = Kind::kTextBegin};
    if (take("\\z")) return RegexNode{.kind = Kind::kTextEnd};
    if (take(".")) return RegexNode{.kind = Kind::kSet, .set = single('\n').inverted()};
    refuse(sees("*") || sees("+") || sees("?"), "a quantifier of nothing");
    if (sees("\\")) return RegexNode{.kind = Kind::kSet, .set = folded(escape())};
    const auto c = next();
    if (ignore_case_ && is_ascii_letter(c)) {
      refuse_ligature(letter, c | 0x20);
      last_letter_ = c | 0x20;
    }
    return RegexNode{.kind = Kind::kSet, .set = folded(single(c))};
  }

  // Oniguruma's (?i:ss) matches U+00DF, (?i:st) U+FB06, and so on.
  void refuse_ligature(char32_t first, char32_t second) const {
    refuse((first == 's' && (second == 's' || second == 't')) ||
               (first == 'f' && (second == 'f' || second == 'i' || second == 'l')),
           "the case folding of two letters");
  }

  RegexNode group() {
    take("(");
    if (!take("?")) return closed(choice());  // a numbered group, whose number is not used
    if (take(":")) return closed(choice());
    if (take("=")) return wrapped(Kind::kLookAhead);
    if (take("!")) return wrapped(Kind::kLookAheadNot);
    if (take(">")) return wrapped(Kind::kAtomic);
    if (take("i:")) {
      const bool outside = std::exchange(ignore_case_, true);
      auto inner = closed(choice());
      ignore_case_ = outside;
      return inner;
    }
    refuse(sees("<=") || sees("<!"), "a look-behind");
    refuse(true, "this kind of group");
    return {};
  }
  RegexNode wrapped(Kind kind) {
    RegexNode node{.kind = kind};
    node.children.push_back(closed(choice()));
    return node;
  }
  RegexNode closed(RegexNode node) {
    refuse(!take(")"), "a group without its )");
    last_letter_ = 0;
    return node;
  }

  // Puts `part` under the quantifier that follows it.
  bool quantifier(RegexNode& part) {
    std::uint32_t min = 0, max = RegexNode::kUnbounded;
    bool braces = false;
    if (take("*")) {
    } else if (take("+")) {
      min = 1;
    } else if (take("?")) {
      max = 1;
    } else if (sees("{") && interval(min, max)) {
      braces = true;
    } else {
      return false;
    }
    auto greed = Greed::kGreedy;
    if (take("?")) {
      refuse(braces && min == max, "a lazy count");  // Ruby reads (?:x{n})?
      greed = Greed::kLazy;
    } else if (sees("+")) {
      refuse(braces, "a count with a +");  // Ruby reads (?:x{n,m})+
      take("+");
      greed = Greed::kPossessive;
    }
    const bool unbounded = max == RegexNode::kUnbounded;
    refuse(unbounded && part.can_be_empty(), "a repetition of what can be empty");
    RegexNode node{.kind = Kind::kRepeat, .min = min, .max = max, .greed = greed};
    node.children.push_back(std::move(part));
    part = std::move(node);
    last_letter_ = 0;
    return true;
  }

  // {n}, {n,}, {,m} or {n,m}; any other brace is an ordinary character.
  bool interval(std::uint32_t& min, std::uint32_t& max) {
    const auto close = pattern_.find('}', at_);
    if (close == std::string_view::npos) return false;
    const auto inside = pattern_.substr(at_ + 1, close - at_ - 1);
    const auto comma = inside.find(',');
    const auto low = inside.substr(0, comma);
    const auto high = comma == std::string_view::npos ? low : inside.substr(comma + 1);
    const auto number = [](std::string_view digits) {
      return std::ranges::all_of(digits, [](char c) { return c >= '0' && c <= '9'; });
    };
    if (!number(low) || !number(high) || (low.empty() && high.empty())) return false;
    const auto value = [&](std::string_view digits) {
      refuse(digits.size() > 4, "so large a count");
      const auto count = static_cast<std::uint32_t>(std::stoul(std::string(digits)));
      refuse(count > kLargestCount, "so large a count");
      return count;
    };
    min = low.empty() ? 0 : value(low);
    max = high.empty() ? RegexNode::kUnbounded : value(high);
    refuse(min > max, "a count that falls");
    at_ = close + 1;
    return true;
  }

  // [...], with ranges, escapes, nested brackets, and && for intersections.
  CodePointSet bracket() {
    refuse(++depth_ > kDeepestNesting, "so deep a nesting");
    take("[");
    refuse(sees(":"), "a POSIX bracket");
    const bool negative = take("^");
    refuse(sees("]"), "an empty bracket");
    CodePointSet all({{0, kLastCodePoint}});
    std::vector<CodePointRange> members;
    const auto add = [&](const CodePointSet& set) {
      members.insert(members.end(), set.ranges().begin(), set.ranges().end());
    };
    while (!take("]")) {
      refuse(ended(), "a bracket without its ]");
      if (take("&&")) {
        all = all.intersected(CodePointSet(std::exchange(members, {})));
      } else if (sees("[")) {
        add(bracket());
      } else {
        add(bracket_range());
      }
    }
    --depth_;
    const auto set = folded(all.intersected(CodePointSet(std::move(members))));
    return negative ? set.inverted() : set;
  }

  CodePointSet bracket_range() {
    const bool escaped = sees("\\");
    auto first = escaped ? escape() : single(next());
    if (!sees("-") || sees("-]")) return first;
    refuse(sees("-[") || sees("-&&"), "a range to a bracket");
    take("-");
    const auto last = sees("\\") ? escape() : single(next());
    const auto is_one = [](const CodePointSet& set) {
      return set.ranges().size() == 1 && set.ranges()[0].first == set.ranges()[0].last;
    };
    refuse(!is_one(first) || !is_one(last), "a range between sets");
    const auto begin = first.ranges()[0].first, end = last.ranges()[0].first;
    refuse(begin > end, "a range that falls");
    return CodePointSet({{begin, end}});
  }

  CodePointSet escape() {
    take("\\");
    if (syntax_ == RegexSyntax::kEcmaScript) {
      if (take("s")) return CodePointSet({{'\t', '\r'}, {' ', ' '}});
      if (take("w")) return CodePointSet({{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}});
      if (take("d")) return CodePointSet({{'0', '9'}});
    }
    if (take("s")) return *CodePointSet::named("WhiteSpace");
    if (take("S")) return CodePointSet::named("WhiteSpace")->inverted();
    if (take("w")) return *CodePointSet::named("Word");
    if (take("W")) return CodePointSet::named("Word")->inverted();
    if (take("d")) return *CodePointSet::named("Nd");
    if (take("D")) return CodePointSet::named("Nd")->inverted();
    if (take("p{^") || take("P{")) return property().inverted();
    if (take("p{")) return property();
    if (take("x{")) return single(hexadecimal(8, "}"));
    if (take("x")) return single(hexadecimal(2, ""));
    if (take("u")) return single(hexadecimal(4, ""));
    static constexpr std::pair<char, char> kControls[] = {
        {'n', '\n'}, {'r', '\r'}, {'t', '\t'}, {'f', '\f'}, {'v', '\v'}, {'a', '\a'}, {'e', 0x1B}};
    for (const auto& [name, control] : kControls) {
      if (take(std::string_view(&name, 1))) return single(static_cast<char32_t>(control));
    }
    refuse(!ended() && (is_ascii_letter(static_cast<unsigned char>(pattern_[at_])) ||
                        (pattern_[at_] >= '0' && pattern_[at_] <= '9')),
           "this escape");
    return single(next());
  }

  CodePointSet property() {
    const auto close = pattern_.find('}', at_);
    refuse(close == std::string_view::npos, "a property without its }");
    const auto* set = CodePointSet::named(pattern_.substr(at_, close - at_));
    refuse(set == nullptr, "this property");
    at_ = close + 1;
    return *set;
  }

  char32_t hexadecimal(std::size_t most, std::string_view closing) {
    char32_t value = 0;
    std::size_t digits = 0;
    for (; digits < most && !ended(); ++digits, ++at_) {
      const auto c = static_cast<unsigned char>(pattern_[at_]);
      const auto letter = static_cast<unsigned char>(c | 0x20);
      if (c >= '0' && c <= '9') {
        value = value * 16 + (c - '0');
      } else if (letter >= 'a' && letter <= 'f') {
        value = value * 16 + (letter - 'a' + 10U);
      } else {
        break;
      }
    }
    const bool is_byte = most == 2 && value >= 0x80;  // a byte, not a character
    refuse(digits == 0 || (most == 4 && digits < 4) || !take(closing) || is_byte ||
               value > kLastCodePoint,
           "this number");
    return value;
  }

  // Adds the other case of ASCII letters, and the two characters beyond ASCII that fold to one.
  CodePointSet folded(CodePointSet set) const {
    if (!ignore_case_) return set;
    std::vector<CodePointRange> ranges = set.ranges();
    const auto given = ranges.size();
    for (std::size_t i = 0; i < given; ++i) {
      refuse(ranges[i].last >= 0x80, "case folding beyond ASCII");
      for (auto c = ranges[i].first; c <= ranges[i].last; ++c) {
        if (!is_ascii_letter(c)) continue;
        ranges.push_back({c ^ 0x20, c ^ 0x20});
        if ((c | 0x20) == 's') ranges.push_back({0x17F, 0x17F});    // long s
        if ((c | 0x20) == 'k') ranges.push_back({0x212A, 0x212A});  // kelvin
      }
    }
    return CodePointSet(std::move(ranges));
  }

  std::string_view pattern_;
  RegexSyntax syntax_;
  std::size_t at_ = 0;
  int depth_ = 0;
  bool ignore_case_ = false;
  char32_t last_letter_ = 0;  // the letter before, if case is ignored; else 0
};

}  // namespace

bool RegexNode::can_be_empty() const {
  const auto empty = [](const RegexNode& child) { return child.can_be_empty(); };
  switch (kind) {
    case Kind::kSet:
      return false;
    case Kind::kSequence:
      return std::ranges::all_of(children, empty);
    case Kind::kChoice:
      return std::ranges::any_of(children, empty);
    case Kind::kRepeat:
      return min == 0 || children.front().can_be_empty();
    case Kind::kAtomic:
      return children.front().can_be_empty();
    default:
      return true;
  }
}

RegexNode parse_regex(std::string_view pattern, RegexSyntax syntax) {
  return Parser(pattern, syntax).parse();
}

}  // namespace ferry::rollout::text
