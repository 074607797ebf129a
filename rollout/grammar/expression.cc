#include "rollout/grammar/expression.h"

#include <array>
#include <map>
#include <utility>

namespace ferry::rollout::grammar {
namespace {

using Kind = Expression::Kind;

ExpressionPtr make(Expression expression) {
  return std::make_shared<const Expression>(std::move(expression));
}

// Splits the characters from `first` to `last`, whose encodings have equal lengths, into products
// of ranges of bytes (Cox, RE2's utf8 ranges).
void add_utf8(char32_t first, char32_t last, std::vector<ExpressionPtr>& into) {
  std::string low, high;
  text::append_utf8(first, low);
  text::append_utf8(last, high);
  for (std::size_t i = 1; i < low.size(); ++i) {
    const char32_t rest = (char32_t{1} << (6 * i)) - 1;
    if ((first & ~rest) == (last & ~rest)) continue;
    if ((first & rest) != 0) {
      add_utf8(first, first | rest, into);
      return add_utf8((first | rest) + 1, last, into);
    }
    if ((last & rest) != rest) {
      add_utf8(first, (last & ~rest) - 1, into);
      return add_utf8(last & ~rest, last, into);
    }
  }
  std::vector<ExpressionPtr> product;
  for (std::size_t i = 0; i < low.size(); ++i)
    product.push_back(bytes(static_cast<std::uint8_t>(low[i]), static_cast<std::uint8_t>(high[i])));
  into.push_back(sequence(std::move(product)));
}

}  // namespace

ExpressionPtr bytes(std::uint8_t first, std::uint8_t last) {
  return make({.kind = Kind::kBytes, .first = first, .last = last});
}

ExpressionPtr literal(std::string text) {
  return make({.kind = Kind::kLiteral, .text = std::move(text)});
}

ExpressionPtr sequence(std::vector<ExpressionPtr> children) {
  if (children.size() == 1) return children.front();
  return make({.kind = Kind::kSequence, .children = std::move(children)});
}

ExpressionPtr choice(std::vector<ExpressionPtr> children) {
  if (children.size() == 1) return children.front();
  return make({.kind = Kind::kChoice, .children = std::move(children)});
}

ExpressionPtr repeat(ExpressionPtr child, std::uint32_t min, std::uint32_t max) {
  Expression repeated{.kind = Kind::kRepeat, .min = min, .max = max};
  repeated.children.push_back(std::move(child));
  return make(std::move(repeated));
}

ExpressionPtr optional(ExpressionPtr child) {
  return repeat(std::move(child), 0, 1);
}

ExpressionPtr star(ExpressionPtr child) {
  return repeat(std::move(child), 0, Expression::kUnbounded);
}

ExpressionPtr nothing() {
  return sequence({});
}

ExpressionPtr never() {
  return choice({});
}

ExpressionPtr character(const text::CodePointSet& set) {
  constexpr std::array<text::CodePointRange, 5> kLengths{{{0, 0x7F},
                                                          {0x80, 0x7FF},
                                                          {0x800, 0xD7FF},
                                                          {0xE000, 0xFFFF},
                                                          {0x10000, text::kLastCodePoint}}};
  std::vector<ExpressionPtr> all;
  for (const auto& range : set.ranges()) {
    for (const auto& of_length : kLengths) {
      const auto first = std::max(range.first, of_length.first);
      const auto last = std::min(range.last, of_length.last);
      if (first <= last) add_utf8(first, last, all);
    }
  }
  return choice(std::move(all));
}

std::uint32_t Rules::declare() {
  rules_.emplace_back();
  return static_cast<std::uint32_t>(rules_.size() - 1);
}

void Rules::define(std::uint32_t rule, ExpressionPtr expression) {
  rules_[rule] = std::move(expression);
}

ExpressionPtr Rules::add(ExpressionPtr expression) {
  const auto rule = declare();
  define(rule, std::move(expression));
  return use(rule);
}

ExpressionPtr Rules::use(std::uint32_t rule) {
  return make({.kind = Kind::kRule, .min = rule});
}

// One rule for each beginning of `end` that the text before it has just ended with (Knuth, Morris
// and Pratt).
ExpressionPtr text_without(std::string_view end, Rules& rules) {
  const auto other = rules.add(character(text::CodePointSet({{0x80, text::kLastCodePoint}})));
  std::vector<std::uint32_t> of_length;
  for (std::size_t i = 0; i < end.size(); ++i) of_length.push_back(rules.declare());
  const auto next = [&](std::size_t length, char byte) {
    const auto seen = std::string(end.substr(0, length)) + byte;
    for (std::size_t size = seen.size(); size > 0; --size)
      if (end.starts_with(std::string_view(seen).substr(seen.size() - size))) return size;
    return std::size_t{0};
  };
  for (std::size_t i = 0; i < end.size(); ++i) {
    std::vector<ExpressionPtr> ways{nothing(), sequence({other, Rules::use(of_length[0])})};
    std::uint8_t begin = 0;
    while (begin < 0x80) {  // runs of bytes that lead to the same rule
      const auto to = next(i, static_cast<char>(begin));
      auto last = begin;
      while (last < 0x7F && next(i, static_cast<char>(last + 1)) == to) ++last;
      if (to < end.size())
        ways.push_back(sequence({bytes(begin, last), Rules::use(of_length[to])}));
      begin = static_cast<std::uint8_t>(last + 1);
    }
    rules.define(of_length[i], choice(std::move(ways)));
  }
  return Rules::use(of_length[0]);
}

}  // namespace ferry::rollout::grammar
