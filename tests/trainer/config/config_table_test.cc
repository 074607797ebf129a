#include "trainer/config/config_table.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/expect.h"

namespace ferry::trainer {
namespace config_table_test {

enum class Style : std::uint8_t { kConstant, kLinear, kCosine };

}  // namespace config_table_test

template <>
inline constexpr auto kChoices<config_table_test::Style> =
    std::to_array<Named<config_table_test::Style>>({{"constant",
                                                     config_table_test::Style::kConstant},
                                                    {"linear", config_table_test::Style::kLinear},
                                                    {"cosine", config_table_test::Style::kCosine}});

namespace config_table_test {

using support::fails;

struct Options {
  bool flag = false;
  int count = 3;
  std::int64_t big = 4;
  double rate = 0.5;
  std::string name = "n";
  Style style = Style::kLinear;
  std::vector<Style> styles{Style::kConstant};
  std::optional<int> maybe{};
  std::vector<int> numbers{1};
  double share = 1;
  double other_share = 1;
};

class Table : public testing::Test {
 protected:
  Table() {
    table.section("a", "The first");
    table.add("flag", options.flag, "a flag");
    table.add("count", options.count, "a count", at_least(1));
    table.add("big", options.big, "a big one");
    table.add("rate", options.rate, "a rate", from_below(0, 1));
    table.section("b", "The second");
    table.add("name", options.name, "a name");
    table.add("style", options.style, "a style");
    table.add("styles", options.styles, "some styles");
    table.add("maybe", options.maybe, "maybe a number", from_to(1, 9));
    table.add("numbers", options.numbers, "some numbers", above(0));
    table.section("b.c", "A third, within the second");
    table.add("share", options.share, "a share", above_to(0, 1));
    table.section("d.c", "And elsewhere");
    table.add("share", options.other_share, "another share");
  }
  void set(std::string_view text) { table.set(parse_override(text)); }

  Options options;
  ConfigTable table;
};

TEST_F(Table, SetsFieldsOfEachType) {
  for (const char* text :
       {"a.flag=true", "a.count=7", "a.big=9007199254740993", "a.rate=0", "b.name=x y",
        "b.style=cosine", "b.styles=[\"linear\", \"cosine\"]", "b.maybe=9", "b.numbers=[4, 5]"})
    set(text);
  EXPECT_TRUE(options.flag);
  EXPECT_EQ(options.count, 7);
  EXPECT_EQ(options.big, 9007199254740993);
  EXPECT_EQ(options.rate, 0);
  EXPECT_EQ(options.name, "x y");
  EXPECT_EQ(options.style, Style::kCosine);
  EXPECT_EQ(options.styles, (std::vector{Style::kLinear, Style::kCosine}));
  EXPECT_EQ(options.maybe, 9);
  EXPECT_EQ(options.numbers, (std::vector<int>{4, 5}));
  set("b.numbers=6");
  EXPECT_EQ(options.numbers, std::vector<int>{6});
}

TEST_F(Table, GivesDefaultsBackForNull) {
  for (const char* text : {"a.flag=true", "a.count=7", "b.style=cosine", "b.styles=[]", "b.maybe=9",
                           "b.numbers=[4, 5]", "b.name=x"})
    set(text);
  for (const char* text : {"a.flag=null", "a.count=null", "b.style=null", "b.styles=null",
                           "b.maybe=null", "b.numbers=\"null\"", "b.name=null"})
    set(text);
  EXPECT_FALSE(options.flag);
  EXPECT_EQ(options.count, 3);
  EXPECT_EQ(options.style, Style::kLinear);
  EXPECT_EQ(options.styles, std::vector{Style::kConstant});
  EXPECT_EQ(options.maybe, std::nullopt);
  EXPECT_EQ(options.numbers, std::vector<int>{1});
  EXPECT_EQ(options.name, "n");
  EXPECT_EQ(table.describe("a.count"), "a.count = 3 (the default)");
  EXPECT_EQ(table.describe("b.maybe"), "b.maybe is not set (the command line)");
}

TEST_F(Table, RefusesValuesOfAnotherTypeOrOutOfRange) {
  const std::vector<std::pair<const char*, std::string_view>> wrong{
      {"a.flag=1", "a.flag: is 1, true or false is expected"},
      {"a.count=1.5", "a.count: is 1.5, an integer is expected"},
      {"a.count=3000000000", "an integer is expected"},
      {"a.count=0", "a.count: is 0, but must be at least 1"},
      {"a.rate=high", "a.rate: is \"high\", a number is expected"},
      {"a.rate=1", "must be from 0 to below 1"},
      {"a.rate=nan", "must be"},
      {"b.name=[1]", "text is expected"},
      {"b.style=1", "b.style: is 1, text is expected"},
      {"b.style=[\"linear\"]", "text is expected"},
      {"b.styles=[\"linear\", \"tanh\"]", "b.styles: is \"tanh\", but must be one of constant"},
      {"b.styles=[\"linear\", 1]", "a list, each text is expected"},
      {"b.maybe=10", "must be from 1 to 9"},
      {"b.numbers=[1, 0]", "is 0, but must be above 0"},
      {"b.c.share=0", "must be above 0 to 1"},
      {"b.numbers=[[1]]", "a list, each an integer is expected"},
  };
  for (const auto& [text, message] : wrong)
    EXPECT_TRUE(fails(ErrorKind::kUsage, {"the command line: ", message}, [&] { set(text); }))
        << text;
}

TEST_F(Table, SuggestsTheNearestKeyAndChoice) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"a.cuont: there is no such key", "did you mean a.count?"},
                    [&] { set("a.cuont=3"); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"did you mean b.style?"}, [&] { set("a.style=linear"); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"did you mean a.rate?"}, [&] { set("rate=1"); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"did you mean b.c.share?"}, [&] { set("b.share=1"); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"did you mean d.c.share?"}, [&] { set("d.share=1"); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"one of constant, linear, cosine", "did you mean cosine?"},
                    [&] { set("b.style=Cosin"); }));
  try {
    set("x.something_else=3");
    FAIL() << "threw nothing";
  } catch (const Error& error) {
    EXPECT_EQ(error.hint(), "");
  }
}

TEST_F(Table, SaysOfAllKeysThatItLacksAtOnce) {
  const std::vector<ConfigEntry> entries{parse_override("a.cuont=3"), parse_override("a.count=7"),
                                         parse_override("x.something_else=3")};
  try {
    table.set_all(entries);
    FAIL() << "threw nothing";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    EXPECT_STREQ(error.what(), "the command line: a.cuont: there is no such key, and 1 more");
    EXPECT_EQ(error.hint(),
              "a.cuont: did you mean a.count?\nx.something_else: there is no such key");
  }
}

TEST_F(Table, PassesOverASectionWithoutKeys) {
  EXPECT_NO_THROW(table.set({.key = "a", .where = "run.toml:1"}));
  EXPECT_NO_THROW(table.set({.key = "d", .where = "run.toml:1"}));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"run.toml:1: a.count: is a section without keys, an int"},
                    [&] { table.set({.key = "a.count", .where = "run.toml:1"}); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"run.toml:1: c: there is no such key"},
                    [&] { table.set({.key = "c", .where = "run.toml:1"}); }));
}

TEST_F(Table, SaysWhatAFieldIsAndWhoSetIt) {
  EXPECT_EQ(table.describe("a.count"), "a.count = 3 (the default)");
  set("a.count=4");
  EXPECT_EQ(table.describe("a.count"), "a.count = 4 (the command line)");
  EXPECT_EQ(table.describe("b.style"), "b.style = \"linear\" (the default)");
  EXPECT_EQ(table.describe("b.styles"), "b.styles = [\"constant\"] (the default)");
  EXPECT_EQ(table.describe("b.maybe"), "b.maybe is not set (the default)");
}

}  // namespace config_table_test
}  // namespace ferry::trainer
