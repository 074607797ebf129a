#include "trainer/config/config_value.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/temp_dir.h"

namespace ferry::trainer {
namespace config_value_test {

using support::fails;

TEST(ConfigValue, ReadsBackToTheSameAsToml) {
  const std::vector<ConfigValue> values{
      {true},
      {false},
      {std::int64_t{0}},
      {std::numeric_limits<std::int64_t>::min()},
      {std::numeric_limits<std::int64_t>::max()},
      {0.0},
      {-1.0},
      {1e-5},
      {0.1},
      {1e300},
      {5e-324},
      {std::numeric_limits<double>::infinity()},
      {std::string()},
      {std::string("C:\\a \"b\" #c = [d]\n\t\x01\x7f ü")},
      {ConfigValue::List{}},
      {ConfigValue::List{{std::int64_t{1}}, {std::string("a,b")}, {ConfigValue::List{{false}}}}},
  };
  for (const auto& value : values) {
    const auto entry = parse_override("a.b=" + to_toml(value));
    EXPECT_EQ(entry.key, "a.b");
    ASSERT_TRUE(std::holds_alternative<ConfigValue>(entry.value)) << to_toml(value);
    EXPECT_EQ(std::get<ConfigValue>(entry.value), value) << to_toml(value);
  }
}

TEST(Overrides, TakeTextWithoutQuotes) {
  const auto value = [](std::string_view text) {
    return std::get<ConfigValue>(parse_override(text).value);
  };
  EXPECT_EQ(value("a=/data/x=y.jsonl"), ConfigValue{std::string("/data/x=y.jsonl")});
  EXPECT_EQ(value("a=cosine"), ConfigValue{std::string("cosine")});
  EXPECT_EQ(value("a="), ConfigValue{std::string()});
  EXPECT_EQ(value("a=\"3\""), ConfigValue{std::string("3")});
  EXPECT_EQ(value("a=3"), ConfigValue{std::int64_t{3}});
  EXPECT_EQ(value("a=true"), ConfigValue{true});
  EXPECT_EQ(value("a=True"), ConfigValue{true});
  EXPECT_EQ(value("a=False"), ConfigValue{false});
  EXPECT_EQ(value("a=\"True\""), ConfigValue{std::string("True")});
  EXPECT_EQ(value("a=1_000_000"), ConfigValue{std::int64_t{1000000}});
  EXPECT_EQ(value("a=0.5_2"), ConfigValue{std::string("0.5_2")});
  EXPECT_EQ(value("a=[1_2, 3]"),
            (ConfigValue{ConfigValue::List{{std::string("1_2")}, {std::int64_t{3}}}}));
  EXPECT_EQ(to_toml(value("a={ y.z = 2, x = [1], \"b c\" = {} }")),
            "{\"b c\" = {}, x = [1], y = {z = 2}}");
  EXPECT_TRUE(std::holds_alternative<ConfigNull>(parse_override("a=null").value));
  for (const char* text : {"+a.b=1", "++a.b=1"}) EXPECT_EQ(parse_override(text).key, "a.b") << text;
}

TEST(Overrides, RefuseWhatIsNoPair) {
  for (const char* text : {"", "a", "=3"})
    EXPECT_TRUE(fails(ErrorKind::kUsage, {"key=value"}, [&] { parse_override(text); })) << text;
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"more than one line"}, [] { parse_override("a=1\nb=2"); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"the command line", "a", "a list of tables"},
                    [] { parse_override("a=[{x=1}]"); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"list of those"}, [] { parse_override("a=2026-01-01"); }));
}

class TomlFile : public testing::Test {
 protected:
  std::vector<ConfigEntry> read(std::string_view text) {
    distckpt::write_text(dir_ / "run.toml", text);
    return read_toml(dir_ / "run.toml");
  }
  std::string line(int number) { return (dir_ / "run.toml").string() + fmt::format(":{}", number); }

  support::TempDir dir_;
};

TEST_F(TomlFile, NamesTheLineOfEachKey) {
  const auto entries = read("# comment\n[b]\nx = 'null'\n\n[b.c]\ny = ['s']\n[empty]\n");
  ASSERT_EQ(entries.size(), 3U);
  EXPECT_EQ(entries[0].key, "b.c.y");
  EXPECT_EQ(entries[0].where, line(6));
  EXPECT_EQ(entries[1].key, "b.x");
  EXPECT_EQ(entries[1].where, line(3));
  EXPECT_TRUE(std::holds_alternative<ConfigNull>(entries[1].value));
  EXPECT_EQ(entries[2].key, "empty");
  EXPECT_TRUE(std::holds_alternative<std::monostate>(entries[2].value));
}

TEST_F(TomlFile, TakesANumberForTextWhoseBarsAreNotBetweenThousands) {
  const auto entries = read("[a]\nx = 0.5_2  # two\ny = 1_000.5\n'ä' = [7, 5_0.5]\n");
  ASSERT_EQ(entries.size(), 3U);
  EXPECT_EQ(std::get<ConfigValue>(entries[0].value), ConfigValue{std::string("0.5_2")});
  EXPECT_EQ(std::get<ConfigValue>(entries[1].value), ConfigValue{1000.5});
}

TEST_F(TomlFile, NamesTheLineThatIsWrong) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {line(2)}, [&] { read("a = 1\nb = = 2\n"); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {line(2)}, [&] { read("a = 1\na = 2\n"); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {line(3), "c.a"}, [&] { read("\n[c]\na = 2026-01-01\n"); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {line(1), "a"}, [&] { read("[[a]]\nb = 1\n"); }));
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"none.toml"}, [&] { read_toml(dir_ / "none.toml"); }));
}

}  // namespace config_value_test
}  // namespace ferry::trainer
