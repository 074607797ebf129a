// A chat template as a tree.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "rollout/text/jinja/value.h"

namespace ferry::rollout::text::jinja {

struct Node;
using NodePtr = std::unique_ptr<Node>;

struct Node {
  enum class Kind {
    // Expressions. `children` in the order of the text; a missing one is null.
    kConstant,   // value
    kName,       // text
    kList,       // items
    kTuple,      // items
    kDict,       // key, value, key, value ...
    kUnary,      // text: "-", "+" or "not"
    kBinary,     // text: the operator
    kCompare,    // first, then one for each of `names`, the operators: a < b < c
    kCondition,  // value, condition, value otherwise
    kAttribute,  // object; text: the name
    kItem,       // object, index
    kSlice,      // object, start, stop, step
    kCall,       // function, arguments
    kFilter,     // value, arguments; text: the filter
    kTest,       // value, arguments; text: the test
    // Statements
    kOutput,       // expression, or value
    kBlock,        // statements
    kIf,           // condition, block, else or null
    kFor,          // target, iterable, condition or null, body, else or null
    kSet,          // target, value
    kSetBlock,     // target, body, filters over a null
    kFilterBlock,  // body, filters over a null
    kMacro,        // body, defaults of the last parameters; text: the name; names: the parameters
    kBreak,
    kContinue,
  };

  Kind kind = Kind::kConstant;
  int line = 0;
  std::string text{};
  Value value{};
  std::vector<NodePtr> children{};
  // A call, filter or test has an empty name for each positional argument.
  std::vector<std::string> names{};
};

// Throws Error(kUsage) that says the line and what is not supported.
NodePtr parse_template(std::string_view source);

}  // namespace ferry::rollout::text::jinja
