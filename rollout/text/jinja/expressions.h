// The expressions of chat templates, parsed by recursive descent with the precedences of Jinja 3.1.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "rollout/text/jinja/lexer.h"
#include "rollout/text/jinja/syntax.h"

namespace ferry::rollout::text::jinja {

class ExpressionParser {
 public:
  explicit ExpressionParser(std::string_view source) : tokens_(tokenize(source)) {}

  NodePtr expression();
  // One expression, or several with commas between them.
  NodePtr tuple(bool with_condition = true);
  // Parses a filter, after its |, and applies it to `value`.
  NodePtr filter(NodePtr value);

 protected:
  const Token& token() const { return tokens_[at_]; }
  const Token& peek() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  Token take();
  [[noreturn]] void fail_here(const std::string& what) const;  // with the line
  [[noreturn]] void unexpected() const;
  bool skip_operator(std::string_view what);
  bool skip_name(std::string_view what);
  void expect_operator(std::string_view what);
  void expect_name(std::string_view what);
  std::string name();
  NodePtr node(Node::Kind kind, std::string text = "") const;
  template <typename... Children>
  NodePtr node_of(Node::Kind kind, std::string text, Children... children) const {
    auto made = node(kind, std::move(text));
    (made->children.push_back(std::move(children)), ...);
    return made;
  }

  // Bounds the nesting of the text, because each level is a call on this program's stack.
  class Nesting {
   public:
    explicit Nesting(ExpressionParser& parser) : depth_(parser.depth_) {
      if (++depth_ > kDeepestNesting) parser.fail_here("nested too deep");
    }
    ~Nesting() { --depth_; }
    Nesting(const Nesting&) = delete;
    Nesting& operator=(const Nesting&) = delete;

   private:
    static constexpr int kDeepestNesting = 200;
    int& depth_;
  };

 private:
  NodePtr or_expression();
  NodePtr and_expression();
  NodePtr not_expression();
  NodePtr comparison();
  template <typename Operand>
  NodePtr left_to_right(std::initializer_list<std::string_view> operators, Operand&& operand);
  NodePtr sum();
  NodePtr concatenation();
  NodePtr product();
  NodePtr power();
  NodePtr unary(bool with_filters);
  NodePtr primary();
  NodePtr postfix(NodePtr object);
  NodePtr call(NodePtr function);
  NodePtr subscript(NodePtr object);
  void arguments(Node& call);
  NodePtr filters(NodePtr value);
  NodePtr test(NodePtr value);
  bool begins_argument() const;

  std::vector<Token> tokens_;
  std::size_t at_ = 0;
  int depth_ = 0;
};

}  // namespace ferry::rollout::text::jinja
