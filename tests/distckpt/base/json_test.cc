#include "distckpt/base/json.h"

#include <gtest/gtest.h>

#include <cmath>
#include <ctime>
#include <limits>
#include <string>
#include <string_view>

#include "distckpt/base/error.h"
#include "tests/support/expect.h"

namespace ferry::distckpt {
namespace json_test {

using support::fails;

TEST(Json, RefusesAKeyThatOccursTwice) {
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"config.json", "\"b\" occurs twice"},
                    [] { parse_json(R"({"a": {"b": 1, "c": 2, "b": 3}})", "config.json"); }));
  EXPECT_NO_THROW(parse_json(R"({"a": {"b": 1}, "c": [{"b": 1}, {"b": 2}]})", "config.json"));
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"twice"},
                    [] { parse_ordered_json(R"({"a": 1, "\u0061": 2})", "config.json"); }));
}

TEST(JsonMembers, ComeOneAfterAnotherInTheOrderOfTheText) {
  std::string seen;
  visit_json_members(
      R"({"b": {"x": [1, {"y": 2}], "z": []}, "a": 3, "c": "s", "b": null, "d": [], "e": {}})",
      "header", [&](std::string& key, nlohmann::json& value) { seen += key + value.dump() + ";"; });
  EXPECT_EQ(seen, R"(b{"x":[1,{"y":2}],"z":[]};a3;c"s";bnull;d[];e{};)");
}

TEST(JsonMembers, RefuseWhatIsNoObjectAsTheWholeTextIsRefused) {
  const auto visit = [](std::string_view text) {
    visit_json_members(text, "header", [](std::string&, nlohmann::json&) {});
  };
  for (const char* text : {"[]", "[1]", "3", "null", "true", "1.5", "\"s\"", "-1", "[[]]"}) {
    EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"header: is not a JSON object"}, [&] { visit(text); }))
        << text;
  }
  for (const char* text : {"", "{", "{} {}", R"({"a": 1 "b": 2})", R"({"a": )", R"({"a": 1e999})"})
    EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"header: is not valid JSON"}, [&] { visit(text); }));
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"\"x\" occurs twice"},
                    [&] { visit(R"({"a": {"x": 1, "x": 2}})"); }));
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"128 levels"},
                    [&] { visit("{\"a\": " + std::string(1000, '[')); }));
}

TEST(Json, NamesTheByteThatIsWrong) {
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"config.json", "byte 11"},
                    [] { parse_json(R"({"a": 1 "b": 2})", "config.json"); }));
  for (const char* text : {"", "{", "[1,", "{} {}", "nan", "\"\xff\"", "{'a': 1}", "1e999"}) {
    EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"config.json"}, [&] {
      parse_json(text, "config.json");
    })) << text;
  }
}

TEST(Json, RefusesDeepNestingWithoutRecursion) {
  const std::string deep(1'000'000, '[');
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"128 levels"}, [&] { parse_json(deep, "config.json"); }));
}

// A value is built in the time of its length; with a look through its parent at the end of every
// object, these took minutes.
TEST(Json, ReadsManyObjectsInTheTimeOfTheirLength) {
  constexpr int kTensors = 60'000;
  std::string header = "{";
  for (int i = 0; i < kTensors; ++i) {
    header += fmt::format(
        R"({}"model.layers.{}.weight":{{"dtype":"BF16","shape":[1,2],"data_offsets":[{},{}]}})",
        i == 0 ? "" : ",", i, 4L * i, 4L * i + 4);
  }
  header += "}";
  std::string list = "[{}";
  for (int i = 0; i < 200'000; ++i) list += ",{}";
  list += "]";
  const auto start = std::clock();
  EXPECT_EQ(parse_json(header, "x").size(), kTensors);
  EXPECT_EQ(parse_ordered_json(header, "x").size(), kTensors);
  EXPECT_EQ(parse_json(list, "x").size(), 200'001);
  EXPECT_LT((std::clock() - start) / CLOCKS_PER_SEC, 10) << "seconds of CPU time";
}

TEST(Json, RefusesWhatWouldTakeMuchMemory) {
  std::string zeros(60'000'000, '0');
  for (std::size_t i = 2; i < zeros.size(); i += 2) zeros[i] = ',';
  zeros.front() = '[';
  zeros.back() = ']';
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"x: ", "360 MB"}, [&] { parse_json(zeros, "x"); }));
}

TEST(Json, IsDiscardedWhereALineIsBrokenOff) {
  EXPECT_EQ(json_or_discarded(R"({"a": 1, "a": 2})"), (nlohmann::json{{"a", 2}}));
  for (const auto* text : {"", R"({"a": 1)", "nul", "1 2"})
    EXPECT_TRUE(json_or_discarded(text).is_discarded()) << text;
}

TEST(Json, KeepsTheOrderOfKeysWhereAsked) {
  EXPECT_EQ(parse_ordered_json(R"({"b": 1, "a": 2})", "x").dump(), R"({"b":1,"a":2})");
  EXPECT_EQ(parse_json(R"({"b": 1, "a": 2})", "x").dump(), R"({"a":2,"b":1})");
}

TEST(Json, ReadsPythonsWordsForNumbersWherePythonDoes) {
  constexpr std::string_view kText =
      R"({"limits":[-Infinity,1,NaN,2.5,Infinity],"a":{"NaN":Infinity},"\\\"":"-Infinity, NaN","b":0})";
  const auto json = parse_python_json(kText, "config.json");
  EXPECT_EQ(json["limits"][0].get<double>(), -std::numeric_limits<double>::infinity());
  EXPECT_EQ(json["limits"][1].get<int>(), 1);
  EXPECT_TRUE(std::isnan(json["limits"][2].get<double>()));
  EXPECT_EQ(json["limits"][3].get<double>(), 2.5);
  EXPECT_EQ(json["a"]["NaN"].get<double>(), std::numeric_limits<double>::infinity());
  EXPECT_EQ(json["\\\""].get<std::string>(), "-Infinity, NaN");
  EXPECT_EQ(python_json(parse_ordered_python_json(kText, "x")), kText);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"config.json", "byte"},
                    [&] { parse_json(kText, "config.json"); }));
}

TEST(Json, NamesTheByteThatIsWrongBesidePythonsWords) {
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"config.json", "byte 22"},
                    [] { parse_python_json(R"({"a": -Infinity, "b" 1})", "config.json"); }));
  for (const char* text : {"nan", "Infinit", "+Infinity", "--Infinity", "Infinity1", "[NaN NaN]",
                           "{NaN: 1}", "- Infinity", "NaN.", "-NaN", "1e999", "\"NaN"}) {
    EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"config.json"}, [&] {
      parse_python_json(text, "config.json");
    })) << text;
  }
}

TEST(Json, WritesTheLinesThatItsLibraryWrites) {
  constexpr std::string_view kText =
      R"({"b":[],"a":{"x":[1,[2.5,{"y":{}}],"\u00fc\n"],"z":null},"c":[true,false,-1e-7,18446744073709551615]})";
  const auto json = parse_ordered_json(kText, "x");
  EXPECT_EQ(python_json(json, 2), json.dump(2));
  EXPECT_EQ(python_json(json), json.dump());
}

TEST(Json, MembersAreOfTheTypeThatIsExpected) {
  const auto json = parse_json(
      R"({"i": -3, "big": 9223372036854775808, "max": 9223372036854775807, "f": 1.0, "s": "x"})",
      "x");
  EXPECT_EQ(json_int(json_at(json, "i", "x"), "i", "x"), -3);
  EXPECT_EQ(json_int(json_at(json, "max", "x"), "max", "x"), INT64_MAX);
  EXPECT_EQ(json_string(json_at(json, "s", "x"), "s", "x"), "x");
  EXPECT_TRUE(
      fails(ErrorKind::kCorrupt, {"\"absent\" is missing"}, [&] { json_at(json, "absent", "x"); }));
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"not a JSON object"},
                    [&] { json_at(json_at(json, "i", "x"), "a", "x"); }));
  for (const char* key : {"big", "f", "s"}) {
    EXPECT_TRUE(
        fails(ErrorKind::kCorrupt, {key}, [&] { json_int(json_at(json, key, "x"), key, "x"); }));
  }
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"a string is expected"},
                    [&] { json_string(json_at(json, "i", "x"), "i", "x"); }));
}

}  // namespace json_test
}  // namespace ferry::distckpt
