// The statements of chat templates.
#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "rollout/text/jinja/expressions.h"

namespace ferry::rollout::text::jinja {
namespace {

using Kind = Node::Kind;
using TokenKind = Token::Kind;

class Parser : public ExpressionParser {
 public:
  using ExpressionParser::ExpressionParser;

  NodePtr parse() {
    auto body = statements({});
    if (token().kind != TokenKind::kEnd) unexpected();
    return body;
  }

 private:
  void end_block() {
    if (token().kind != TokenKind::kBlockEnd) unexpected();
    take();
  }

  // Parses statements up to a tag whose name is one of `ends`; {% and the name are consumed.
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
    } else if (keyword == "filter") {
      made = node(Kind::kFilterBlock);
      auto filters = filter(nullptr);
      while (skip_operator("|")) filters = filter(std::move(filters));
      end_block();
      made->children.push_back(statements({"endfilter"}));
      made->children.push_back(std::move(filters));
      end_block();
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
  // Parses `else` and its block, up to the end of the statement; null if there is no `else`.
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

  int loops_ = 0;
  std::string end_;  // the name that ended the last statements()
};

}  // namespace

NodePtr parse_template(std::string_view source) {
  return Parser(source).parse();
}

}  // namespace ferry::rollout::text::jinja
