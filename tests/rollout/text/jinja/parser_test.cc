#include <gtest/gtest.h>

#include "rollout/text/jinja/syntax.h"
#include "tests/support/expect.h"

namespace ferry::rollout::text::jinja {
namespace parser_test {

using Kind = Node::Kind;
using support::fails;

// An expression in prefix form, "(+ a (* b c))": names and constants, operators and their operands.
std::string prefix(const Node* node) {
  if (node == nullptr) return "-";
  std::string text;
  switch (node->kind) {
    case Kind::kName:
      return node->text;
    case Kind::kConstant:
      return node->value.repr();
    case Kind::kCompare:
      for (const auto& name : node->names) text += (text.empty() ? "" : " ") + name;
      break;
    case Kind::kTuple:
      text = "tuple";
      break;
    case Kind::kList:
      text = "list";
      break;
    case Kind::kDict:
      text = "dict";
      break;
    case Kind::kCondition:
      text = "if";
      break;
    case Kind::kAttribute:
      text = "." + node->text;
      break;
    case Kind::kItem:
      text = "item";
      break;
    case Kind::kSlice:
      text = "slice";
      break;
    case Kind::kCall:
      text = "call";
      break;
    case Kind::kFilter:
      text = "|" + node->text;
      break;
    case Kind::kTest:
      text = "is " + node->text;
      break;
    default:
      text = node->text;
  }
  for (const auto& child : node->children) text += " " + prefix(child.get());
  return "(" + text + ")";
}

std::string expression(const std::string& source) {
  const auto root = parse_template("{{ " + source + " }}");
  return prefix(root->children.at(0)->children.at(0).get());
}

TEST(Parser, ProductsBindTighterThanSums) {
  EXPECT_EQ(expression("a + b * c - d"), "(- (+ a (* b c)) d)");
}

TEST(Parser, ConcatenationBindsTighterThanSums) {
  EXPECT_EQ(expression("a + b ~ c"), "(+ a (~ b c))");
}

TEST(Parser, PowersAreTakenFromTheLeft) {  // unlike Python's
  EXPECT_EQ(expression("a ** b ** c"), "(** (** a b) c)");
}

TEST(Parser, AndBindsTighterThanOr) {
  EXPECT_EQ(expression("a or b and not c"), "(or a (and b (not c)))");
}

TEST(Parser, ComparisonsFormAChain) {
  EXPECT_EQ(expression("a < b <= c"), "(< <= a b c)");
}

TEST(Parser, NotInIsOneOperator) {
  EXPECT_EQ(expression("a not in b"), "(not in a b)");
}

TEST(Parser, AFilterBindsTighterThanAnOperator) {
  EXPECT_EQ(expression("a + b | upper"), "(+ a (|upper b))");
}

TEST(Parser, FiltersFollowOneAnother) {
  EXPECT_EQ(expression("a | trim | join(',')"), "(|join (|trim a) ',')");
}

TEST(Parser, ATestMayBeNegated) {
  EXPECT_EQ(expression("a is not defined"), "(not (is defined a))");
}

TEST(Parser, ATestTakesAnArgumentWithoutBrackets) {
  EXPECT_EQ(expression("a is divisibleby 3"), "(is divisibleby a 3)");
}

TEST(Parser, AConditionMayLackItsElse) {
  EXPECT_EQ(expression("a if b"), "(if a b -)");
  EXPECT_EQ(expression("a if b else c"), "(if a b c)");
}

TEST(Parser, MembersItemsAndCallsFollowTheirObject) {
  EXPECT_EQ(expression("a.b[0](c)"), "(call (item (.b a) 0) c)");
}

TEST(Parser, ASliceMayLackEachOfItsBounds) {
  EXPECT_EQ(expression("a[:2]"), "(slice a - 2 -)");
  EXPECT_EQ(expression("a[::-1]"), "(slice a - - (- 1))");
}

TEST(Parser, CommasMakeATuple) {
  EXPECT_EQ(expression("a, b"), "(tuple a b)");
  EXPECT_EQ(expression("(a,)"), "(tuple a)");
  EXPECT_EQ(expression("()"), "(tuple)");
}

TEST(Parser, ACommaMayEndAListOrDictionary) {
  EXPECT_EQ(expression("[1, 2,]"), "(list 1 2)");
  EXPECT_EQ(expression("{'a': 1,}"), "(dict 'a' 1)");
}

TEST(Parser, StringsSideBySideAreOne) {
  EXPECT_EQ(expression("'a' \"b\""), "'ab'");
}

TEST(Parser, ACallKeepsTheNamesOfItsArguments) {
  const auto root = parse_template("{{ f(1, x=2) }}");
  const auto& call = *root->children[0]->children[0];
  EXPECT_EQ(call.names, (std::vector<std::string>{"", "x"}));
}

TEST(Parser, ElifIsAnIfInsideOfElse) {
  const auto root = parse_template("{% if a %}1{% elif b %}2{% else %}3{% endif %}");
  const auto& outer = *root->children.at(0);
  ASSERT_EQ(outer.children.size(), 3);
  EXPECT_EQ(outer.children[2]->kind, Kind::kIf);
  EXPECT_EQ(outer.children[2]->children[2]->kind, Kind::kBlock);
}

TEST(Parser, ALoopKeepsItsConditionAndItsElse) {
  const auto root = parse_template("{% for a, b in c if d %}x{% else %}y{% endfor %}");
  const auto& loop = *root->children.at(0);
  EXPECT_EQ(prefix(loop.children[0].get()), "(tuple a b)");
  EXPECT_EQ(prefix(loop.children[2].get()), "d");
  EXPECT_NE(loop.children[4], nullptr);
}

TEST(Parser, AMacroKeepsItsDefaults) {
  const auto root = parse_template("{% macro f(a, b=1) %}x{% endmacro %}");
  const auto& macro = *root->children.at(0);
  EXPECT_EQ(macro.names, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(macro.children.size(), 2);
}

TEST(Parser, ABlockWithoutItsEndIsNamed) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"line 1: the template ends without endfor"},
                    [] { parse_template("{% for a in b %}x"); }));
}

TEST(Parser, BreakNeedsALoop) {
  EXPECT_TRUE(
      fails(ErrorKind::kUsage, {"break outside of a loop"}, [] { parse_template("{% break %}"); }));
}

TEST(Parser, AMacroInsideALoopIsNotInTheLoop) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"break outside of a loop"}, [] {
    parse_template("{% for a in b %}{% macro f() %}{% break %}{% endmacro %}{% endfor %}");
  }));
}

TEST(Parser, ARecursiveLoopIsRefused) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"a recursive loop is not supported"},
                    [] { parse_template("{% for a in b recursive %}{% endfor %}"); }));
}

TEST(Parser, APositionalArgumentBehindANamedOneIsRefused) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"unexpected"}, [] { parse_template("{{ f(a=1, 2) }}"); }));
}

TEST(Parser, ANumberBeyond64BitsIsNamed) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"the number 9223372036854775808 is too large"},
                    [] { parse_template("{{ 9223372036854775808 }}"); }));
}

TEST(Parser, DeepNestingIsRefused) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"nested too deep"}, [] {
    parse_template("{{ " + std::string(300, '(') + "1" + std::string(300, ')') + " }}");
  }));
}

}  // namespace parser_test
}  // namespace ferry::rollout::text::jinja
