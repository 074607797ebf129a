#include "rollout/text/literals.h"

#include <gtest/gtest.h>

#include <string>

#include "rollout/text/shallow_json.h"

namespace ferry::rollout::text {
namespace python_literal_test {

std::string read(std::string_view text) {
  const auto parsed = parse_python_literal(text);
  return parsed.is_discarded() ? "none" : json_text(parsed);
}

TEST(PythonLiteral, ReadsWhatStrWrites) {
  EXPECT_EQ(read(" [1, None, {'a': '}', \"it's\": (True, False)}, -2.5e-07] "),
            R"([1,null,{"a":"}","it's":[true,false]},-2.5e-07])");
  EXPECT_EQ(read(R"('q"\'\\\n\t\x07\u6f22\U0001f600\q')"),
            parse_shallow_json(R"("q\"'\\\n\t\u0007漢😀\\q")").dump());
  EXPECT_EQ(read("()"), "[]");
  EXPECT_EQ(read("(1,)"), "[1]");
  EXPECT_EQ(read("{}"), "{}");
  EXPECT_EQ(read("[[1], [2,],]"), "[[1],[2]]");
  EXPECT_EQ(read("[-123456789012345678901234567890, 1e30]"),
            "[-123456789012345678901234567890,1e+30]");
}

TEST(PythonLiteral, RefusesWhatIsNone) {
  for (const char* text :
       {"",    "[",     "[1",  "[1 2]", "(1)",    "{1: 2}",    "{'a'}", "{'a': }",
        "nul", "Nonee", "'a",  "'a\n'", "'\\x4'", "'\\ud800'", "1 + 1", "__import__('os')",
        "[,]", "1e",    "--1", "[1] 2"}) {
    EXPECT_EQ(read(text), "none") << text;
  }
  const std::string deep(kDeepestJson + 2, '[');
  EXPECT_EQ(read(deep + std::string(deep.size(), ']')), "none");
  EXPECT_EQ(read("'" + std::string(20'000, 'a') + "'"), "none");
}

}  // namespace python_literal_test
}  // namespace ferry::rollout::text
