#include "rollout/grammar/regex_expression.h"

#include <fmt/format.h>

#include <utility>

#include "distckpt/base/error.h"
#include "rollout/text/regex/regex_tree.h"

namespace ferry::rollout::grammar {
namespace {

using text::CodePointSet;
using text::RegexNode;
using NodeKind = text::RegexNode::Kind;

class RegexWriter {
 public:
  RegexWriter(std::string_view pattern, bool in_json, bool is_search)
      : pattern_(pattern), in_json_(in_json), is_search_(is_search) {}

  ExpressionPtr write() {
    const auto tree = text::parse_regex(pattern_, text::RegexSyntax::kEcmaScript);
    return outermost(tree);
  }

 private:
  [[noreturn]] void refuse(std::string_view what) const {
    throw Error(ErrorKind::kUsage,
                fmt::format("the pattern {}: {} is not supported", pattern_, what));
  }
  static bool is_begin(const RegexNode& node) {
    return node.kind == NodeKind::kLineBegin || node.kind == NodeKind::kTextBegin;
  }
  static bool is_end(const RegexNode& node) {
    return node.kind == NodeKind::kLineEnd || node.kind == NodeKind::kTextEnd;
  }

  // Takes the anchors off each alternative.
  ExpressionPtr outermost(const RegexNode& node) {
    if (node.kind == NodeKind::kChoice) {
      std::vector<ExpressionPtr> ways;
      for (const auto& child : node.children) ways.push_back(outermost(child));
      return choice(std::move(ways));
    }
    if (node.kind != NodeKind::kSequence) {
      RegexNode whole{.kind = NodeKind::kSequence};
      whole.children.push_back(node);
      return outermost(whole);
    }
    auto first = node.children.begin(), last = node.children.end();
    const bool begins = first != last && is_begin(*first);
    if (begins) ++first;
    const bool ends = first != last && is_end(*(last - 1));
    if (ends) --last;
    std::vector<ExpressionPtr> parts;
    if (is_search_ && !begins) parts.push_back(anything());
    for (; first != last; ++first) parts.push_back(part(*first));
    if (is_search_ && !ends) parts.push_back(anything());
    return sequence(std::move(parts));
  }

  ExpressionPtr anything() const { return star(one_of(CodePointSet({{0, text::kLastCodePoint}}))); }
  ExpressionPtr one_of(const CodePointSet& set) const {
    return in_json_ ? json_character(set) : character(set);
  }

  ExpressionPtr part(const RegexNode& node) {
    switch (node.kind) {
      case NodeKind::kSet:
        return one_of(node.set);
      case NodeKind::kSequence:
      case NodeKind::kChoice: {
        std::vector<ExpressionPtr> parts;
        for (const auto& child : node.children) parts.push_back(part(child));
        return node.kind == NodeKind::kChoice ? choice(std::move(parts))
                                              : sequence(std::move(parts));
      }
      case NodeKind::kRepeat:
        if (node.greed == RegexNode::Greed::kPossessive) refuse("a possessive quantifier");
        return repeat(part(node.children.front()), node.min, node.max);
      case NodeKind::kLookAhead:
      case NodeKind::kLookAheadNot:
        refuse("a look-ahead");
      case NodeKind::kAtomic:
        refuse("an atomic group");
      case NodeKind::kLineBegin:
      case NodeKind::kLineEnd:
      case NodeKind::kTextBegin:
      case NodeKind::kTextEnd:
        break;
    }
    refuse("an anchor inside");
  }

  std::string_view pattern_;
  bool in_json_;
  bool is_search_;
};

}  // namespace

ExpressionPtr regex_expression(std::string_view pattern) {
  return RegexWriter(pattern, false, false).write();
}

ExpressionPtr regex_in_json_string(std::string_view pattern) {
  return RegexWriter(pattern, true, true).write();
}

ExpressionPtr json_character(const CodePointSet& set) {
  static const CodePointSet plain(
      {{0x20, '"' - 1}, {'"' + 1, '\\' - 1}, {'\\' + 1, text::kLastCodePoint}});
  std::vector<ExpressionPtr> ways{character(set.intersected(plain))};
  for (const char32_t c : {U'"', U'\\'})
    if (set.contains(c)) ways.push_back(literal({'\\', static_cast<char>(c)}));
  static constexpr std::string_view kShort = "\bb\tt\nn\ff\rr";
  for (char32_t c = 0; c < 0x20; ++c) {
    if (!set.contains(c)) continue;
    const auto at = kShort.find(static_cast<char>(c));
    ways.push_back(literal(at == std::string_view::npos
                               ? fmt::format("\\u{:04x}", static_cast<unsigned>(c))
                               : std::string{'\\', kShort[at + 1]}));
  }
  return choice(std::move(ways));
}

}  // namespace ferry::rollout::grammar
