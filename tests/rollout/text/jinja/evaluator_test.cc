#include "rollout/text/jinja/evaluator.h"

#include <gtest/gtest.h>

#include "tests/support/expect.h"

namespace ferry::rollout::text::jinja {
namespace evaluator_test {

using nlohmann::ordered_json;
using support::fails;

std::string text_of(std::string_view source,
                    const ordered_json& variables = ordered_json::object()) {
  const auto root = parse_template(source);
  Dict given;
  for (const auto& [name, value] : variables.items()) given.set(name, Value::of_json(value));
  return render(*root, given);
}

TEST(Evaluator, AnUndefinedNameIsNoText) {
  EXPECT_EQ(text_of("[{{ x }}]"), "[]");
}

TEST(Evaluator, AMemberOfAnUndefinedNameIsAnError) {
  EXPECT_TRUE(
      fails(ErrorKind::kUsage, {"line 2: 'x' is undefined"}, [] { text_of("\n{{ x.y }}"); }));
}

TEST(Evaluator, AndReturnsAnOperand) {
  EXPECT_EQ(text_of("{{ 0 and 1 }} {{ 2 and 3 }} {{ '' or 'b' }}"), "0 3 b");
}

TEST(Evaluator, AndDoesNotEvaluateWhatItNeedNot) {
  EXPECT_EQ(text_of("{{ false and x.y }}"), "False");
}

TEST(Evaluator, AConditionWithoutElseIsUndefined) {
  EXPECT_EQ(text_of("[{{ 1 if false }}]"), "[]");
}

TEST(Evaluator, AChainOfComparisonsHoldsIfAllDo) {
  EXPECT_EQ(text_of("{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }}"), "True False");
}

TEST(Evaluator, ALoopKnowsItsPlace) {
  EXPECT_EQ(text_of("{% for x in [4, 5] %}{{ loop.index }}/{{ loop.length }}:{{ x }} {% endfor %}"),
            "1/2:4 2/2:5 ");
}

TEST(Evaluator, ALoopKnowsItsNeighbours) {
  EXPECT_EQ(text_of("{% for x in [1, 2] %}{{ loop.previtem }}<{{ x }}<{{ loop.nextitem }};"
                    "{% endfor %}"),
            "<1<2;1<2<;");
}

TEST(Evaluator, ALoopSkipsWhatItsConditionExcludes) {
  EXPECT_EQ(text_of("{% for x in [1, 2, 3] if x != 2 %}{{ loop.index }}{{ x }} {% endfor %}"),
            "11 23 ");
}

TEST(Evaluator, AnEmptyLoopRunsItsElse) {
  EXPECT_EQ(text_of("{% for x in [] %}a{% else %}b{% endfor %}"), "b");
}

TEST(Evaluator, BreakLeavesTheInnerLoopOnly) {
  EXPECT_EQ(text_of("{% for x in [1, 2] %}{% for y in 'ab' %}{{ y }}{% break %}{% endfor %}"
                    "{% endfor %}"),
            "aa");
}

TEST(Evaluator, ContinueSkipsTheRestOfARound) {
  EXPECT_EQ(text_of("{% for x in [1, 2] %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}"
                    "{% endfor %}"),
            "2");
}

TEST(Evaluator, AVariableSetInALoopEndsWithItsRound) {
  EXPECT_EQ(text_of("{% set a = 1 %}{% for x in [1] %}{% set a = 2 %}{% endfor %}{{ a }}"), "1");
}

TEST(Evaluator, ANamespaceKeepsWhatALoopSets) {
  EXPECT_EQ(text_of("{% set n = namespace(a=1) %}{% for x in [5] %}{% set n.a = x %}{% endfor %}"
                    "{{ n.a }}"),
            "5");
}

TEST(Evaluator, AMemberOfAnythingElseCannotBeSet) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"cannot assign attribute on non-namespace object"},
                    [] { text_of("{% set d = {} %}{% set d.a = 1 %}"); }));
}

TEST(Evaluator, ATupleIsTakenApart) {
  EXPECT_EQ(text_of("{% for a, b in {'x': 1}.items() %}{{ a }}{{ b }}{% endfor %}"), "x1");
}

TEST(Evaluator, ATupleOfAnotherSizeIsAnError) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"3 values for 2 names"},
                    [] { text_of("{% set a, b = [1, 2, 3] %}"); }));
}

TEST(Evaluator, ASetBlockHoldsItsTextAfterItsFilters) {
  EXPECT_EQ(text_of("{% set a | upper %}x{{ 1 }}{% endset %}{{ a }}"), "X1");
}

TEST(Evaluator, AMacroTakesDefaultsAndNames) {
  EXPECT_EQ(
      text_of("{% macro f(a, b='-') %}{{ a }}{{ b }}{% endmacro %}{{ f(1) }}{{ f(b=2, a=3) }}"),
      "1-32");
}

TEST(Evaluator, AMacroRefusesAnUnknownArgument) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"macro 'f' takes no keyword argument 'z'"},
                    [] { text_of("{% macro f(a) %}{% endmacro %}{{ f(z=1) }}"); }));
}

TEST(Evaluator, AMacroThatCallsItselfWithoutEndIsStopped) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"calls are nested too deep"},
                    [] { text_of("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"); }));
}

TEST(Evaluator, ALargeTextIsStopped) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"a text is too long"},
                    [] { text_of("{{ 'abcdefgh' * 9999999 }}"); }));
}

TEST(Evaluator, AnUnknownFilterIsRefusedBeforeItRuns) {
  const auto root = parse_template("{% if false %}{{ 1 | groupby }}{% endif %}");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"line 1: the filter groupby is not supported"},
                    [&] { require_known_names(*root); }));
}

TEST(Evaluator, TheVariablesOfTheCallerStay) {
  EXPECT_EQ(text_of("{{ m[0].content }}", {{"m", {{{"content", "hi"}}}}}), "hi");
}

}  // namespace evaluator_test
}  // namespace ferry::rollout::text::jinja
