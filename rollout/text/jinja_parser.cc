#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <initializer_list>

#include "rollout/text/jinja_lexer.h"
#include "rollout/text/jinja_syntax.h"

namespace ferry::rollout::text::jinja {
namespace {

using Kind = Node::Kind;
using TokenKind = Token::Kind;

constexpr int kDeepestNesting = 200;

class Parser {
 public:
  explicit Parser(std::string_view source) : tokens_(tokenize(source)) {}

  NodePtr parse() {
    auto body = statements({});
    if (token().kind != TokenKind::kEnd) unexpected();
    return body;
  }

 private:
  const Token& token() const { return tokens_[at_]; }
  const Token& peek() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  Token take() {
    auto taken = tokens_[at_];
    if (at_ + 1 < tokens_.size()) ++at_;
    return taken;
  }
  [[noreturn]] void fail_here(const std::string& what) const {
    fail_template(fmt::format("line {}: {}", token().line, what));
  }
  [[noreturn]] void unexpected() const {
    fail_here(token().kind == TokenKind::kEnd ? "the template ends too early"
                                              : fmt::format("unexpected '{}'", token().text));
  }
  bool skip_operator(std::string_view what) {
    if (!token().is_operator(what)) return false;
    take();
    return true;
  }
  bool skip_name(std::string_view what) {
    if (!token().is_name(what)) return false;
    take();
    return true;
  }
  void expect_operator(std::string_view what) {
    if (!skip_operator(what)) unexpected();
  }
  void expect_name(std::string_view what) {
    if (!skip_name(what)) unexpected();
  }
  std::string name() {
    if (token().kind != TokenKind::kName) unexpected();
    return take().text;
  }
  void end_block() {
    if (token().kind != TokenKind::kBlockEnd) unexpected();
    take();
  }
  NodePtr node(Kind kind, std::string text = "") const {
    auto made = std::make_unique<Node>();
    made->kind = kind;
    made->line = token().line;
    made->text = std::move(text);
    return made;
  }
  template <typename... Children>
  NodePtr node_of(Kind kind, std::string text, Children... children) const {
    auto made = node(kind, std::move(text));
    (made->children.push_back(std::move(children)), ...);
    return made;
  }

  // Counts how deep the text nests, since each level is a call of this program.
  class Nesting {
   public:
    explicit Nesting(Parser& parser) : depth_(parser.depth_) {
      if (++depth_ > kDeepestNesting) parser.fail_here("nested too deep");
    }
    ~Nesting() { --depth_; }
    Nesting(const Nesting&) = delete;
    Nesting& operator=(const Nesting&) = delete;

   private:
    int& depth_;
  };

  // --------------------------------------------------------------------------------- statements

  // Until a block whose name is one of `ends`, of which {% and the name are taken.
  NodePtr statements(std::initializer_list<std::string_view> ends) {
    const Nesting nesting(*this);
    auto body = node(Kind::kBlock);
    while (token().kind != TokenKind::kEnd) {
      if (token().kind == TokenKind::kData) {
        auto output = node(Kind::kOutput);
        output->value = take().text;
        body->children.push_back(std::move(output));
      } else if (token().kind == TokenKind::kVariableBegin) {
        take();
        auto output = node(Kind::kOutput);
        output->children.push_back(tuple());
        if (token().kind != TokenKind::kVariableEnd) unexpected();
        take();
        body->children.push_back(std::move(output));
      } else {
        take();  // {%
        const auto found = std::ranges::find(ends, std::string_view(token().text));
        if (token().kind == TokenKind::kName && found != ends.end()) {
          end_ = take().text;
          return body;
        }
        body->children.push_back(statement());
      }
    }
    if (ends.size() > 0) fail_here(fmt::format("the template ends without {}", *(ends.end() - 1)));
    return body;
  }

  NodePtr statement() {
    const auto line = token().line;
    const auto keyword = name();
    NodePtr made;
    if (keyword == "if") {
      made = if_statement();
    } else if (keyword == "for") {
      made = for_statement();
    } else if (keyword == "set") {
      made = set_statement();
    } else if (keyword == "macro") {
      made = macro();
    } else if (keyword == "generation") {  // marks for training what the model says
      end_block();
      made = statements({"endgeneration"});
      end_block();
    } else if (keyword == "break" || keyword == "continue") {
      if (loops_ == 0) fail_here(fmt::format("{} outside of a loop", keyword));
      made = node(keyword == "break" ? Kind::kBreak : Kind::kContinue);
      end_block();
    } else {
      fail_template(fmt::format("line {}: the tag '{}' is not supported", line, keyword));
    }
    made->line = line;
    return made;
  }

  NodePtr if_statement() {
    auto made = node(Kind::kIf);
    made->children.push_back(tuple(false));
    end_block();
    made->children.push_back(statements({"elif", "else", "endif"}));
    if (end_ == "elif") {
      const Nesting nesting(*this);
      made->children.push_back(if_statement());
      return made;
    }
    made->children.push_back(else_block("endif"));
    return made;
  }
  // Behind else or the end of a statement; null where there is no else.
  NodePtr else_block(std::string_view end) {
    NodePtr otherwise;
    if (end_ == "else") {
      end_block();
      otherwise = statements({end});
    }
    end_block();
    return otherwise;
  }

  NodePtr for_statement() {
    auto made = node(Kind::kFor);
    made->children.push_back(target(false));
    expect_name("in");
    made->children.push_back(tuple(false));
    made->children.push_back(skip_name("if") ? expression() : nullptr);
    if (token().is_name("recursive")) fail_here("a recursive loop is not supported");
    end_block();
    ++loops_;
    made->children.push_back(statements({"else", "endfor"}));
    --loops_;
    made->children.push_back(else_block("endfor"));
    return made;
  }

  // A name, names in a tuple, or the member of a namespace.
  NodePtr target(bool with_namespace) {
    const auto one = [&]() -> NodePtr {
      if (token().is_operator("(")) {
        take();
        auto inner = target(false);
        expect_operator(")");
        return inner;
      }
      return node(Kind::kName, name());
    };
    if (with_namespace && peek().is_operator(".")) {
      auto object = node(Kind::kName, name());
      take();
      auto member = node(Kind::kAttribute, name());
      member->children.push_back(std::move(object));
      return member;
    }
    auto first = one();
    if (!token().is_operator(",")) return first;
    auto all = node(Kind::kTuple);
    all->children.push_back(std::move(first));
    while (skip_operator(",")) {
      if (token().kind != TokenKind::kName && !token().is_operator("(")) break;
      if (token().is_name("in")) break;
      all->children.push_back(one());
    }
    return all;
  }

  NodePtr set_statement() {
    auto made = node(Kind::kSet);
    made->children.push_back(target(true));
    if (skip_operator("=")) {
      made->children.push_back(tuple());
      end_block();
      return made;
    }
    made->kind = Kind::kSetBlock;
    NodePtr filters;  // over the text of the block, which is the null at their bottom
    while (skip_operator("|")) filters = filter(std::move(filters));
    end_block();
    made->children.push_back(statements({"endset"}));
    end_block();
    made->children.push_back(std::move(filters));
    return made;
  }

  NodePtr macro() {
    auto made = node(Kind::kMacro, name());
    made->children.push_back(nullptr);
    expect_operator("(");
    while (!token().is_operator(")")) {
      if (!made->names.empty()) expect_operator(",");
      if (token().is_operator(")")) break;
      made->names.push_back(name());
      if (skip_operator("=")) {
        made->children.push_back(expression());
      } else if (made->children.size() > 1) {
        fail_here("a parameter without a default behind one with it");
      }
    }
    take();
    end_block();
    const int loops = std::exchange(loops_, 0);
    made->children.front() = statements({"endmacro"});
    loops_ = loops;
    end_block();
    return made;
  }

  // -------------------------------------------------------------------------------- expressions

  // One expression, or several with commas between them.
  NodePtr tuple(bool with_condition = true) {
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

  NodePtr expression() {
    const Nesting nesting(*this);
    auto value = or_expression();
    while (skip_name("if")) {
      auto condition = or_expression();
      auto otherwise = skip_name("else") ? expression() : nullptr;
      value = node_of(Kind::kCondition, "", std::move(value), std::move(condition),
                      std::move(otherwise));
    }
    return value;
  }
  NodePtr or_expression() {
    auto left = and_expression();
    while (skip_name("or")) left = node_of(Kind::kBinary, "or", std::move(left), and_expression());
    return left;
  }
  NodePtr and_expression() {
    auto left = not_expression();
    while (skip_name("and"))
      left = node_of(Kind::kBinary, "and", std::move(left), not_expression());
    return left;
  }
  NodePtr not_expression() {
    if (!skip_name("not")) return comparison();
    const Nesting nesting(*this);
    return node_of(Kind::kUnary, "not", not_expression());
  }

  NodePtr comparison() {
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
  NodePtr left_to_right(std::initializer_list<std::string_view> operators, Operand&& operand) {
    auto left = operand();
    while (token().kind == TokenKind::kOperator &&
           std::ranges::find(operators, std::string_view(token().text)) != operators.end()) {
      auto symbol = take().text;
      left = node_of(Kind::kBinary, std::move(symbol), std::move(left), operand());
    }
    return left;
  }
  NodePtr sum() {
    return left_to_right({"+", "-"}, [&] { return concatenation(); });
  }
  NodePtr concatenation() {
    return left_to_right({"~"}, [&] { return product(); });
  }
  NodePtr product() {
    return left_to_right({"*", "/", "//", "%"}, [&] { return power(); });
  }
  NodePtr power() {
    return left_to_right({"**"}, [&] { return unary(true); });
  }

  NodePtr unary(bool with_filters) {
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

  NodePtr primary() {
    const auto current = token();
    auto made = node(Kind::kConstant);
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
      case TokenKind::kInteger: {
        std::int64_t number = 0;
        const auto end = current.text.data() + current.text.size();
        if (std::from_chars(current.text.data(), end, number).ec != std::errc()) {
          fail_here(fmt::format("the number {} is too large", current.text));
        }
        take();
        made->value = number;
        return made;
      }
      case TokenKind::kFloat:
        made->value = std::stod(take().text);
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

  NodePtr postfix(NodePtr object) {
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
  NodePtr call(NodePtr function) {
    auto made = node_of(Kind::kCall, "", std::move(function));
    arguments(*made);
    return made;
  }

  NodePtr subscript(NodePtr object) {
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

  void arguments(Node& call) {
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

  NodePtr filters(NodePtr value) {
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
  NodePtr filter(NodePtr value) {
    auto made = node(Kind::kFilter, name());
    made->children.push_back(std::move(value));
    if (token().is_operator("(")) arguments(*made);
    return made;
  }
  NodePtr test(NodePtr value) {
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
  bool begins_argument() const {
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

  std::vector<Token> tokens_;
  std::size_t at_ = 0;
  int depth_ = 0;
  int loops_ = 0;
  std::string end_;  // the name that ended the last statements()
};

}  // namespace

NodePtr parse_template(std::string_view source) {
  return Parser(source).parse();
}

}  // namespace ferry::rollout::text::jinja
