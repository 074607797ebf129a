#include "rollout/text/jinja/expressions.h"

#include <fmt/format.h>

#include <array>
#include <charconv>

namespace ferry::rollout::text::jinja {
namespace {

using Kind = Node::Kind;
using TokenKind = Token::Kind;

}  // namespace

Token ExpressionParser::take() {
  auto taken = tokens_[at_];
  if (at_ + 1 < tokens_.size()) ++at_;
  return taken;
}
void ExpressionParser::fail_here(const std::string& what) const {
  fail_template(fmt::format("line {}: {}", token().line, what));
}
void ExpressionParser::unexpected() const {
  fail_here(token().kind == TokenKind::kEnd ? "the template ends too early"
                                            : fmt::format("unexpected '{}'", token().text));
}
bool ExpressionParser::skip_operator(std::string_view what) {
  if (!token().is_operator(what)) return false;
  take();
  return true;
}
bool ExpressionParser::skip_name(std::string_view what) {
  if (!token().is_name(what)) return false;
  take();
  return true;
}
void ExpressionParser::expect_operator(std::string_view what) {
  if (!skip_operator(what)) unexpected();
}
void ExpressionParser::expect_name(std::string_view what) {
  if (!skip_name(what)) unexpected();
}
std::string ExpressionParser::name() {
  if (token().kind != TokenKind::kName) unexpected();
  return take().text;
}
NodePtr ExpressionParser::node(Kind kind, std::string text) const {
  auto made = std::make_unique<Node>();
  made->kind = kind;
  made->line = token().line;
  made->text = std::move(text);
  return made;
}

// One expression, or several with commas between them.
NodePtr ExpressionParser::tuple(bool with_condition) {
  const auto one = [&] { return with_condition ? expression() : or_expression(); };
  auto first = one();
  if (!token().is_operator(",")) return first;
  auto all = node(Kind::kTuple);
  all->children.push_back(std::move(first));
  while (skip_operator(",")) {
    if (token().kind == TokenKind::kBlockEnd || token().kind == TokenKind::kVariableEnd ||
        token().is_operator(")")) {
      break;
    }
    all->children.push_back(one());
  }
  return all;
}

NodePtr ExpressionParser::expression() {
  const Nesting nesting(*this);
  auto value = or_expression();
  while (skip_name("if")) {
    auto condition = or_expression();
    auto otherwise = skip_name("else") ? expression() : nullptr;
    value =
        node_of(Kind::kCondition, "", std::move(value), std::move(condition), std::move(otherwise));
  }
  return value;
}

NodePtr ExpressionParser::or_expression() {
  auto left = and_expression();
  while (skip_name("or")) left = node_of(Kind::kBinary, "or", std::move(left), and_expression());
  return left;
}

NodePtr ExpressionParser::and_expression() {
  auto left = not_expression();
  while (skip_name("and")) left = node_of(Kind::kBinary, "and", std::move(left), not_expression());
  return left;
}

NodePtr ExpressionParser::not_expression() {
  if (!skip_name("not")) return comparison();
  const Nesting nesting(*this);
  return node_of(Kind::kUnary, "not", not_expression());
}

NodePtr ExpressionParser::comparison() {
  auto first = sum();
  auto made = node(Kind::kCompare);
  made->children.push_back(std::move(first));
  while (true) {
    static constexpr std::array<std::string_view, 6> kOperators = {"==", "!=", "<",
                                                                   "<=", ">",  ">="};
    const bool known = token().kind == TokenKind::kOperator &&
                       std::ranges::find(kOperators, token().text) != kOperators.end();
    if (known) {
      made->names.push_back(take().text);
    } else if (skip_name("in")) {
      made->names.emplace_back("in");
    } else if (token().is_name("not") && peek().is_name("in")) {
      take();
      take();
      made->names.emplace_back("not in");
    } else {
      break;
    }
    made->children.push_back(sum());
  }
  return made->names.empty() ? std::move(made->children.front()) : std::move(made);
}

template <typename Operand>
NodePtr ExpressionParser::left_to_right(std::initializer_list<std::string_view> operators,
                                        Operand&& operand) {
  auto left = operand();
  while (token().kind == TokenKind::kOperator &&
         std::ranges::find(operators, std::string_view(token().text)) != operators.end()) {
    auto symbol = take().text;
    left = node_of(Kind::kBinary, std::move(symbol), std::move(left), operand());
  }
  return left;
}

NodePtr ExpressionParser::sum() {
  return left_to_right({"+", "-"}, [&] { return concatenation(); });
}

NodePtr ExpressionParser::concatenation() {
  return left_to_right({"~"}, [&] { return product(); });
}

NodePtr ExpressionParser::product() {
  return left_to_right({"*", "/", "//", "%"}, [&] { return power(); });
}

NodePtr ExpressionParser::power() {
  return left_to_right({"**"}, [&] { return unary(true); });
}

NodePtr ExpressionParser::unary(bool with_filters) {
  const Nesting nesting(*this);
  NodePtr made;
  if (token().is_operator("-") || token().is_operator("+")) {
    auto sign = take().text;
    made = node_of(Kind::kUnary, std::move(sign), unary(false));
  } else {
    made = primary();
  }
  made = postfix(std::move(made));
  return with_filters ? filters(std::move(made)) : std::move(made);
}

NodePtr ExpressionParser::primary() {
  const auto current = token();
  auto made = node(Kind::kConstant);
  const auto number = [&](auto value, std::string_view limit) {
    const auto& text = current.text;
    if (std::from_chars(text.data(), text.data() + text.size(), value).ec != std::errc())
      fail_here(fmt::format("the number {} is too {}", text, limit));
    take();
    return value;
  };
  switch (current.kind) {
    case TokenKind::kName: {
      take();
      const auto& text = current.text;
      if (text == "true" || text == "True") {
        made->value = true;
      } else if (text == "false" || text == "False") {
        made->value = false;
      } else if (text != "none" && text != "None") {
        made->kind = Kind::kName;
        made->text = text;
      }
      return made;
    }
    case TokenKind::kString: {
      std::string text;
      while (token().kind == TokenKind::kString) text += take().text;
      made->value = std::move(text);
      return made;
    }
    case TokenKind::kInteger:
      made->value = number(std::int64_t{0}, "large");
      return made;
    case TokenKind::kFloat:
      made->value = number(0.0, "large or too small");
      return made;
    default:
      break;
  }
  if (skip_operator("(")) {
    if (skip_operator(")")) return node(Kind::kTuple);
    auto inner = tuple();
    expect_operator(")");
    return inner;
  }
  if (skip_operator("[")) {
    made->kind = Kind::kList;
    while (!skip_operator("]")) {
      if (!made->children.empty()) expect_operator(",");
      if (skip_operator("]")) break;
      made->children.push_back(expression());
    }
    return made;
  }
  if (skip_operator("{")) {
    made->kind = Kind::kDict;
    while (!skip_operator("}")) {
      if (!made->children.empty()) expect_operator(",");
      if (skip_operator("}")) break;
      made->children.push_back(expression());
      expect_operator(":");
      made->children.push_back(expression());
    }
    return made;
  }
  unexpected();
}

NodePtr ExpressionParser::postfix(NodePtr object) {
  while (true) {
    if (skip_operator(".")) {
      if (token().kind == TokenKind::kInteger) {
        auto index = node(Kind::kConstant);
        index->value = std::int64_t{std::stoi(take().text.substr(0, 9))};
        object = node_of(Kind::kItem, "", std::move(object), std::move(index));
      } else {
        auto member = name();
        object = node_of(Kind::kAttribute, std::move(member), std::move(object));
      }
    } else if (skip_operator("[")) {
      object = subscript(std::move(object));
    } else if (token().is_operator("(")) {
      object = call(std::move(object));
    } else {
      return object;
    }
  }
}

NodePtr ExpressionParser::call(NodePtr function) {
  auto made = node_of(Kind::kCall, "", std::move(function));
  arguments(*made);
  return made;
}

NodePtr ExpressionParser::subscript(NodePtr object) {
  const auto bound = [&]() -> NodePtr {
    return token().is_operator(":") || token().is_operator("]") ? nullptr : expression();
  };
  auto start = bound();
  if (!skip_operator(":")) {
    if (start == nullptr) unexpected();
    expect_operator("]");
    return node_of(Kind::kItem, "", std::move(object), std::move(start));
  }
  auto stop = bound();
  auto step = skip_operator(":") ? bound() : nullptr;
  expect_operator("]");
  return node_of(Kind::kSlice, "", std::move(object), std::move(start), std::move(stop),
                 std::move(step));
}

void ExpressionParser::arguments(Node& call) {
  expect_operator("(");
  while (!skip_operator(")")) {
    if (!call.names.empty()) expect_operator(",");
    if (skip_operator(")")) break;
    if (token().is_operator("*") || token().is_operator("**")) {
      fail_here("an argument with a star is not supported");
    }
    const bool named = token().kind == TokenKind::kName && peek().is_operator("=");
    if (!named && !call.names.empty() && !call.names.back().empty()) unexpected();
    call.names.push_back(named ? name() : "");
    if (named) take();
    call.children.push_back(expression());
  }
}

NodePtr ExpressionParser::filters(NodePtr value) {
  while (true) {
    if (skip_operator("|")) {
      value = filter(std::move(value));
    } else if (skip_name("is")) {
      value = test(std::move(value));
    } else if (token().is_operator("(")) {
      value = call(std::move(value));
    } else {
      return value;
    }
  }
}

NodePtr ExpressionParser::filter(NodePtr value) {
  auto made = node(Kind::kFilter, name());
  made->children.push_back(std::move(value));
  if (token().is_operator("(")) arguments(*made);
  return made;
}

NodePtr ExpressionParser::test(NodePtr value) {
  const bool negated = skip_name("not");
  auto made = node(Kind::kTest, name());
  made->children.push_back(std::move(value));
  if (token().is_operator("(")) {
    arguments(*made);
  } else if (begins_argument()) {
    made->names.emplace_back();
    made->children.push_back(postfix(primary()));
  }
  return negated ? node_of(Kind::kUnary, "not", std::move(made)) : std::move(made);
}

// "x is divisibleby 3": an argument without brackets.
bool ExpressionParser::begins_argument() const {
  switch (token().kind) {
    case TokenKind::kString:
    case TokenKind::kInteger:
    case TokenKind::kFloat:
      return true;
    case TokenKind::kOperator:
      return token().text == "[" || token().text == "{";
    case TokenKind::kName: {
      static constexpr std::array<std::string_view, 6> kOthers = {"else", "or", "and",
                                                                  "if",   "in", "not"};
      if (token().text == "is") fail_here("a test of a test is not supported");
      return std::ranges::find(kOthers, token().text) == kOthers.end();
    }
    default:
      return false;
  }
}

}  // namespace ferry::rollout::text::jinja
