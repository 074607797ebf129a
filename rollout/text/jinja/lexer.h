// The text of a chat template as tokens, with Jinja's control of white space as transformers sets
// it: trim_blocks and lstrip_blocks.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace ferry::rollout::text::jinja {

struct Token {
  enum class Kind {
    kData,           // text between tags
    kVariableBegin,  // {{
    kVariableEnd,
    kBlockBegin,  // {%
    kBlockEnd,
    kName,
    kString,  // text: what the literal stands for
    kInteger,
    kFloat,
    kOperator,
    kEnd,
  };

  Kind kind = Kind::kEnd;
  std::string text{};
  int line = 0;

  bool is(Kind other, std::string_view what) const { return kind == other && text == what; }
  bool is_operator(std::string_view what) const { return is(Kind::kOperator, what); }
  bool is_name(std::string_view what) const { return is(Kind::kName, what); }
};

// The last token is a kEnd. Throws Error(kUsage) "line N: ...".
std::vector<Token> tokenize(std::string_view source);

}  // namespace ferry::rollout::text::jinja
