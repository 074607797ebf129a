// Pickles of Python are read and not executed.
#include "distckpt/formats/torch_save/pickle.h"

#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/formats/torch_save/pickle_writer.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"

namespace ferry::distckpt {
namespace pickle_test {

using namespace std::string_literals;
using namespace std::string_view_literals;

constexpr std::string_view kPickleGlobals[] = {
    "torch.",          "argparse.Namespace",      "builtins.bytearray", "builtins.set",
    "__builtin__.set", "collections.OrderedDict", "megatron.core.",
};

Pickle parse_pickle_of(std::string bytes) {
  return Pickle::parse(std::move(bytes), {.source = "x.pkl", .allowed_globals = kPickleGlobals});
}

// A pickle of protocol 2 of these opcodes.
Pickle parse_opcodes(std::string_view opcodes) {
  return parse_pickle_of("\x80\x02"s + std::string(opcodes) + ".");
}

std::string pickle_error_of(std::string bytes) {
  try {
    parse_pickle_of(std::move(bytes));
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kCorrupt);
    return error.what();
  }
  return "no error";
}

template <typename Body>
std::string error_in(Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

std::string from_hex(std::string_view hex) {
  std::string bytes;
  for (std::size_t i = 0; i < hex.size(); i += 2) {
    bytes.push_back(static_cast<char>(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16)));
  }
  return bytes;
}

// pickle.dumps of the dict below, by Python with protocol 4.
constexpr std::string_view kEveryKind =
    "800495a6000000000000007d94288c016194284b014afeffffff4d2c014a701101008a060000000000018a06"
    "0000000000ff8a0800000000000000408a0800000000000000808a09000000000000000001473ff800000000"
    "000074948c0162945d94284e888943027879948c0368c3a994658c0163948f94284b07908c016494284b0891"
    "948c0165948c086275696c74696e73948c0962797465617272617994939443017a94859452948c0166942975"
    "2e";

TEST(Pickle, ReadsEveryKindThatPythonWrites) {
  const Pickle pickle = parse_pickle_of(from_hex(kEveryKind));
  const PickleValue root = pickle.root();
  ASSERT_EQ(root.kind(), PickleKind::kDict);
  EXPECT_EQ(root.size(), 6U);

  const PickleValue numbers = root.at("a");
  ASSERT_EQ(numbers.kind(), PickleKind::kTuple);
  const std::vector<std::int64_t> expected{1,
                                           -2,
                                           300,
                                           70'000,
                                           std::int64_t{1} << 40,
                                           -(std::int64_t{1} << 40),
                                           std::int64_t{1} << 62,
                                           std::numeric_limits<std::int64_t>::min()};
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(numbers[i].as_int(), expected[i]);
  EXPECT_EQ(numbers[8].kind(), PickleKind::kBigInt);  // 2 ** 64
  EXPECT_EQ(numbers[8].as_bytes(), "\0\0\0\0\0\0\0\0\1"sv);
  EXPECT_EQ(numbers[9].as_float(), 1.5);
  EXPECT_EQ(numbers[0].as_float(), 1.0);

  const PickleValue list = root.at("b");
  ASSERT_EQ(list.kind(), PickleKind::kList);
  EXPECT_TRUE(list[0].is_none());
  EXPECT_TRUE(list[1].as_bool());
  EXPECT_FALSE(list[2].as_bool());
  EXPECT_EQ(list[3].as_bytes(), "xy");
  EXPECT_EQ(list[4].as_string(), "h\xC3\xA9");

  EXPECT_EQ(root.at("c").kind(), PickleKind::kSet);
  EXPECT_EQ((*root.at("d").elements().begin()).as_int(), 8);
  EXPECT_TRUE(root.at("e").is_object("builtins.bytearray"));
  EXPECT_EQ(root.at("e").object_args()[0].as_bytes(), "z");
  EXPECT_EQ(root.at("f").size(), 0U);
}

TEST(Pickle, ReadsContainersThatPythonBuildsByCalls) {
  const Pickle ordered = parse_pickle_of(
      "\x80\x02"
      "ccollections\nOrderedDict\nq\x00)Rq\x01X\x01\x00\x00\x00"
      "aq\x02K\x01s."s);
  EXPECT_EQ(ordered.root().kind(), PickleKind::kDict);
  EXPECT_EQ(ordered.root().at("a").as_int(), 1);
  const Pickle set = parse_opcodes(
      "c__builtin__\nset\n](K\x01K\x02"
      "e\x85R");
  EXPECT_EQ(set.root().kind(), PickleKind::kSet);
  EXPECT_EQ(set.root().size(), 2U);
}

TEST(Pickle, KeepsWhatAnObjectIsMadeOf) {
  const Pickle pickle = parse_pickle_of(PickleWriter()
                                            .begin_object("argparse.Namespace")
                                            .string("lr")
                                            .real(0.5)
                                            .end_object()
                                            .finish());
  const PickleValue object = pickle.root();
  EXPECT_EQ(object.object_class(), "argparse.Namespace");
  EXPECT_TRUE(object.is_object("argparse.Namespace"));
  EXPECT_FALSE(object.is_object("torch.Size"));
  EXPECT_EQ(object.object_args().size(), 0U);
  EXPECT_EQ(object.at("lr").as_float(), 0.5);
  EXPECT_FALSE(object.find("beta").has_value());
  EXPECT_TRUE(object.object_items().is_none());
  EXPECT_TRUE(object.object_appended().is_none());

  // Items, elements and (None, {slot: value}) of one object.
  const Pickle filled = parse_opcodes(
      "cmegatron.core.x\nY\n)\x81(U\x01kK\x01uK\x02"
      "aN}\x8C\x01sK\x03s\x86"
      "b"sv);
  EXPECT_EQ(filled.root().object_items().size(), 1U);
  EXPECT_EQ(filled.root().object_appended()[0].as_int(), 2);
  EXPECT_EQ(filled.root().object_state().kind(), PickleKind::kDict);
  EXPECT_EQ(filled.root().at("s").as_int(), 3);
}

TEST(Pickle, ADictKeepsTheLastOfTwoEqualKeys) {
  const Pickle pickle = parse_opcodes(
      "}(\x8C\x01"
      "aK\x01\x8C\x01"
      "aK\x02u");
  EXPECT_EQ(pickle.root().at("a").as_int(), 2);
}

TEST(Pickle, GrowsContainersBatchByBatch) {
  std::string opcodes = "]}";
  for (int batch = 0; batch < 100; ++batch) {
    opcodes += "(\x8C\x01kK\x07u";  // the dict
  }
  opcodes += "0";
  for (int batch = 0; batch < 100; ++batch)
    opcodes +=
        "(K\x01K\x02K\x03"
        "e](K\x09"
        "e0";
  const Pickle pickle = parse_opcodes(opcodes);
  ASSERT_EQ(pickle.root().size(), 300U);
  for (std::size_t i = 0; i < 300; ++i) {
    EXPECT_EQ(pickle.root()[i].as_int(), static_cast<std::int64_t>(i % 3 + 1));
  }
}

TEST(Pickle, RefusesAGlobalOutsideTheClosedSet) {
  EXPECT_EQ(pickle_error_of("\x80\x02"
                            "cos\nsystem\n\x8C\x02ls\x85R."),
            "x.pkl: the pickle names os.system at byte 2, which is outside the closed set that is "
            "read (nothing was executed)");
  EXPECT_EQ(pickle_error_of("\x80\x04\x8C\x02os\x8C\x06system\x93."),
            "x.pkl: the pickle names os.system at byte 14, which is outside the closed set that is "
            "read (nothing was executed)");
  // An entry without a dot at its end is one name, not a prefix.
  EXPECT_NE(pickle_error_of("\x80\x02"
                            "cargparse\nNamespaceX\n."),
            "no error");
  EXPECT_NE(pickle_error_of("\x80\x02"
                            "cmegatron\ncore\n."),
            "no error");
  EXPECT_EQ(parse_opcodes("cmegatron.core.enums\nA\n").root().global_name(),
            "megatron.core.enums.A");
}

TEST(Pickle, NamesTheByteOfTheFileThatIsWrong) {
  try {
    Pickle::parse("\x80\x02N\xFF.", {.source = "x.pt", .first_byte = 1'000});
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "x.pt: the pickle has opcode 0xff, which this reader does not know, at byte 1003");
  }
}

TEST(Pickle, RefusesWhatIsNoPickle) {
  const auto expect = [](std::string_view opcodes, std::string_view message) {
    EXPECT_EQ(pickle_error_of("\x80\x02"s + std::string(opcodes)),
              "x.pkl: the pickle " + std::string(message));
  };
  EXPECT_EQ(pickle_error_of(""), "x.pkl: no pickle of protocol 2 or later begins at byte 0");
  EXPECT_EQ(pickle_error_of("{\"json\": 1}"),
            "x.pkl: no pickle of protocol 2 or later begins at byte 0");
  EXPECT_EQ(pickle_error_of("\x80\x06N."), "x.pkl: the pickle is of protocol 6 at byte 0");
  expect("", "is cut short at byte 2");
  expect("N", "is cut short at byte 3");
  expect("J\1\2", "is cut short at byte 2");
  expect(".", "takes a value that is not there at byte 2");
  expect(
      "N\x85"
      "0\x85.",
      "takes a value that is not there at byte 5");
  expect("K\1(0.", "takes a value that is not there at byte 5");  // below the mark
  expect("(e.", "takes a value that is not there at byte 3");
  expect("N\x86.", "takes a value that is not there at byte 3");
  expect("Nt.", "takes a mark that is not there at byte 3");
  expect("h\5.", "recalls what it never memoised at byte 2");
  expect("Nr\xFF\xFF\xFF\x7F.", "memoises under an absurd number at byte 3");
  expect("X\2\0\0\0\xC3\x28."sv, "has a string that is not UTF-8 at byte 2");
  expect("X\xFF\xFF\xFF\xFFx.", "is cut short at byte 2");
  expect("\x8E\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFFx.", "is cut short at byte 2");
  expect("\x95\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x7FN.", "is cut short at byte 2");
  expect("ctorch", "has a line without an end at byte 2");
  expect("c\n\n.", "has a global without a proper name at byte 2");
  expect("}(Nu.", "has a key without a value at byte 5");
  expect("(Nd.", "has a key without a value at byte 4");
  expect("NNa.", "appends to what is not a list at byte 4");
  expect("NNNs.", "sets items of what is not a dict at byte 5");
  expect("](N\x90.", "adds to what is not a set at byte 5");
  expect("N)R.", "calls what is not a global with a tuple at byte 4");
  expect("ctorch\nSize\nNR.", "calls what is not a global with a tuple at byte 15");
  expect("N)\x81.", "instantiates what is not a global with a tuple at byte 4");
  expect("N}b.", "sets the state of what is not an object at byte 4");
  expect("NN.", "stops with values left over at byte 4");
  expect("(N.", "stops with values left over at byte 4");
  expect("N.N", "stops before its end at byte 3");
  expect("I1\n.", "has opcode 0x49, which this reader does not know, at byte 2");
}

TEST(Pickle, AcceptsUtf8AsPythonEncodesIt) {
  EXPECT_EQ(parse_opcodes("\x8C\x04\xF0\x9F\x98\x80").root().as_string(), "\xF0\x9F\x98\x80");
  EXPECT_EQ(parse_opcodes("\x8C\x03\xED\xB2\x80").root().as_string(), "\xED\xB2\x80");  // surrogate
  for (const std::string_view bad : {"\xC0\x80"sv, "\xE0\x80\x80"sv, "\xF5\x80\x80\x80"sv,
                                     "\xF4\x90\x80\x80"sv, "\x80"sv, "\xE2\x82"sv}) {
    std::string bytes = "\x80\x02\x8C";
    bytes.push_back(static_cast<char>(bad.size()));
    EXPECT_NE(pickle_error_of(bytes + std::string(bad) + "."), "no error");
  }
}

TEST(Pickle, AccessorsSayWhatIsThereAndWhatIsExpected) {
  const Pickle pickle =
      parse_pickle_of(PickleWriter().begin_dict().string("a").integer(7).end_dict().finish());
  const PickleValue root = pickle.root();
  EXPECT_EQ(error_in([&] { root.at("a").items(); }),
            "x.pkl: the pickle holds 7 where dict is expected");
  EXPECT_EQ(error_in([&] { root.as_string(); }),
            "x.pkl: the pickle holds {'a': 7} where string is expected");
  EXPECT_EQ(error_in([&] { root.at("b"); }), "x.pkl: the pickle holds {'a': 7}, which lacks 'b'");
  EXPECT_NE(error_in([&] { root[0]; }), "no error");
  EXPECT_NE(error_in([&] { root.elements(); }), "no error");
  EXPECT_NE(error_in([&] { root.at("a").as_bool(); }), "no error");
  EXPECT_NE(error_in([&] { root.at("a").object_state(); }), "no error");
  EXPECT_NE(error_in([&] { root.at("a").global_name(); }), "no error");
  EXPECT_NE(error_in([&] { root.at("a").persistent_id(); }), "no error");
  const Pickle list = parse_pickle_of(PickleWriter().begin_list().none().end_list().finish());
  EXPECT_EQ(error_in([&] { list.root()[1]; }),
            "x.pkl: the pickle holds [None], of 1 elements, where more than 1 are expected");
}

TEST(Pickle, WalksOfAListThatHoldsItselfEnd) {
  const Pickle pickle = parse_opcodes("]q\0h\0a"sv);
  EXPECT_EQ(pickle.root()[0][0][0].size(), 1U);
  EXPECT_EQ(pickle.root().describe(), "[[[[[[[[[...]]]]]]]]]");
  EXPECT_THROW(pickle.root().require_tree(1'000'000, 100), Error);
}

TEST(Pickle, WalksOfListsThatMultiplyEnd) {
  std::string opcodes = "](K\1K\1e";
  for (int i = 0; i < 60; ++i) opcodes += "2\x86";  // the pair of what is there
  const Pickle pickle = parse_opcodes(opcodes);
  EXPECT_LT(pickle.root().describe().size(), 200U);
  EXPECT_THROW(pickle.root().require_tree(1'000'000, 100), Error);
  EXPECT_THROW(pickle.root().require_tree(std::size_t{1} << 62, 10), Error);
  const Pickle flat = parse_opcodes("](K\1K\2e");
  EXPECT_NO_THROW(flat.root().require_tree(3, 2));
  EXPECT_THROW(flat.root().require_tree(2, 2), Error);
}

// Written again as a line, such a name would end where it says, and opcodes begin.
TEST(Pickle, RefusesNamesThatWouldBecomeOpcodes) {
  const std::string injected = "x\ncos\nsystem\n0ctorch\ny"s;
  const auto short_string = [](std::string_view text) {
    return "\x8C"s + static_cast<char>(text.size()) + std::string(text);
  };
  for (const auto& [module, name] : {std::pair<std::string, std::string>{"torch", injected},
                                     {"torch.x\ny", "z"},
                                     {"torch", "x\0"s},
                                     {"torch", "x."},
                                     {"torch.", "x"},
                                     {"torch", ".x"},
                                     {"torch", ""}}) {
    const auto error =
        pickle_error_of("\x80\x04"s + short_string(module) + short_string(name) + "\x93.");
    EXPECT_NE(error.find("a global without a proper name at byte"), std::string::npos) << error;
  }
  EXPECT_EQ(parse_pickle_of("\x80\x04"s + short_string("torch.a") + short_string("B.c") + "\x93.")
                .root()
                .global_name(),
            "torch.a.B.c");
}

// set(list) costs a few bytes and holds as much as the list.
TEST(Pickle, CopiesMadeOverAndOverAreAnError) {
  const std::string list = "](" + std::string(20'000, 'N') + "e\x94";  // 20,000 times None
  const std::string copy = "cbuiltins\nset\nh\0\x85R"s;
  EXPECT_EQ(parse_opcodes(list + copy + "\x86").root()[1].size(), 20'000U);
  std::string copies = list + "(";
  for (int i = 0; i < 2'000; ++i) copies += copy;
  const auto error = pickle_error_of("\x80\x02"s + copies + "l\x86.");
  EXPECT_NE(error.find("holds more values than its bytes can spell"), std::string::npos) << error;
}

TEST(Pickle, ValuesSurviveMovingTheirPickle) {
  Pickle pickle = parse_pickle_of(PickleWriter().begin_list().string("kept").end_list().finish());
  const PickleValue root = pickle.root();
  const Pickle moved = std::move(pickle);
  EXPECT_EQ(root[0].as_string(), "kept");
}

TEST(Pickle, ReadsSizes) {
  const auto size_of = [](const Pickle& pickle) { return as_size(pickle.root()); };
  EXPECT_EQ(size_of(parse_pickle_of(PickleWriter().size({2, 3}).finish())), Dims({2, 3}));
  EXPECT_EQ(size_of(parse_pickle_of(PickleWriter().integers({}).finish())), Dims());
  EXPECT_EQ(size_of(parse_pickle_of(PickleWriter().begin_list().integer(5).end_list().finish())),
            Dims({5}));
  EXPECT_EQ(size_of(parse_pickle_of(PickleWriter().none().finish())), std::nullopt);
  EXPECT_EQ(
      size_of(parse_pickle_of(PickleWriter().begin_tuple().boolean(true).end_tuple().finish())),
      std::nullopt);
  EXPECT_EQ(size_of(parse_pickle_of("\x80\x02(K\1K\1K\1K\1K\1K\1K\1t.")), std::nullopt);  // rank 7
}

// Reaches every value, as a caller would.
void touch(PickleValue value, int depth = 0) {
  if (depth > 30) return;
  value.describe();
  switch (value.kind()) {
    case PickleKind::kDict:
      for (const auto& [key, held] : value.items()) {
        touch(key, depth + 1);
        touch(held, depth + 1);
      }
      value.find("version");
      break;
    case PickleKind::kList:
    case PickleKind::kTuple:
    case PickleKind::kSet:
      for (const PickleValue element : value.elements()) touch(element, depth + 1);
      as_size(value);
      break;
    case PickleKind::kObject:
      touch(value.object_args(), depth + 1);
      touch(value.object_state(), depth + 1);
      touch(value.object_items(), depth + 1);
      touch(value.object_appended(), depth + 1);
      value.find("fqn");
      as_size(value);
      break;
    case PickleKind::kPersistentId:
      touch(value.persistent_id(), depth + 1);
      break;
    case PickleKind::kInt:
      value.as_int();
      break;
    case PickleKind::kFloat:
      value.as_float();
      break;
    case PickleKind::kString:
      value.as_string();
      break;
    default:
      break;
  }
}

void expect_no_crash(const std::string& bytes) {
  try {
    const Pickle pickle = parse_pickle_of(bytes);
    pickle.root().require_tree(100'000, 30);
    touch(pickle.root());
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kCorrupt);
  }
}

// Flips, cuts and repeats bytes of `valid`.
void mutate(const std::string& valid, int rounds) {
  std::mt19937 random(20'240'601);
  const auto below = [&](std::size_t limit) {
    return std::uniform_int_distribution<std::size_t>(0, limit - 1)(random);
  };
  for (int round = 0; round < rounds; ++round) {
    std::string bytes = valid;
    bytes[below(bytes.size())] = static_cast<char>(below(256));
    if (round % 10 == 0) bytes.resize(below(bytes.size()));
    expect_no_crash(bytes);
    if (testing::Test::HasFailure()) FAIL() << "round " << round;
  }
}

TEST(Pickle, SurvivesMutations) {
  mutate(from_hex(kEveryKind), 20'000);
}

TEST(Pickle, ReadsAndSurvivesMutationsOfACheckpointsMetadata) {
  const auto path = support::test_data("llama_tp1/iter_0000010/.metadata");
  const std::string bytes = read_text(path);
  const Pickle pickle = parse_pickle_of(bytes);
  const PickleValue root = pickle.root();
  EXPECT_EQ(root.object_class(), "torch.distributed.checkpoint.metadata.Metadata");
  EXPECT_EQ(root.at("version").as_string(), "1.0.0");
  const PickleValue tensor =
      root.at("state_dict_metadata").at("decoder.layers.mlp.linear_fc2.weight");
  EXPECT_EQ(as_size(tensor.at("size")), Dims({4, 32, 48}));
  EXPECT_EQ(tensor.at("chunks").size(), 4U);
  EXPECT_EQ(as_size(tensor.at("chunks")[3].at("offsets")), Dims({3, 0, 0}));
  EXPECT_EQ(tensor.at("properties").object_state()[0].global_name(), "torch.bfloat16");
  EXPECT_EQ(root.at("storage_data").size(), 49U);
  touch(root);
  mutate(bytes, 10'000);
}

TEST(Pickle, EveryTruncationIsAnError) {
  const std::string bytes = from_hex(kEveryKind);
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_NE(pickle_error_of(bytes.substr(0, size)), "no error") << size;
  }
}

TEST(Pickle, StaysCompact) {
  PickleWriter writer;
  writer.begin_list();
  for (int i = 0; i < 10'000; ++i) writer.size({i, 1'024, 4'096});
  const Pickle pickle = parse_pickle_of(writer.end_list().finish());
  // A Size is an object, two tuples and three ints.
  EXPECT_LT(pickle.memory_bytes(), 10'000U * 300U);
}

// A class inside a class is spelled getattr(class, "name"): it has to be in the closed set as well.
TEST(Pickle, TakesAttributesOfClassesForNames) {
  using namespace std::string_literals;
  const auto pickle =
      "\x80\x02"
      "c__builtin__\ngetattr\nca.b\nC\nX\x05\0\0\0Inner\x86R."s;
  constexpr std::string_view kBoth[] = {"__builtin__.getattr", "a.b.C", "a.b.C.Inner"};
  const auto parsed = Pickle::parse(pickle, {.source = "x.pkl", .allowed_globals = kBoth});
  EXPECT_EQ(parsed.root().global_name(), "a.b.C.Inner");
  constexpr std::string_view kClass[] = {"__builtin__.getattr", "a.b.C"};
  EXPECT_TRUE(support::fails(ErrorKind::kCorrupt, {"a.b.C.Inner", "closed set"}, [&] {
    Pickle::parse(pickle, {.source = "x.pkl", .allowed_globals = kClass});
  }));
  constexpr std::string_view kNoGetattr[] = {"a.b.C", "a.b.C.Inner"};
  EXPECT_TRUE(support::fails(ErrorKind::kCorrupt, {"__builtin__.getattr"}, [&] {
    Pickle::parse(pickle, {.source = "x.pkl", .allowed_globals = kNoGetattr});
  }));
  const auto of_string =
      "\x80\x02"
      "c__builtin__\ngetattr\nX\x01\0\0\0aX\x01\0\0\0b\x86R."s;
  EXPECT_TRUE(support::fails(ErrorKind::kCorrupt, {"attribute"}, [&] {
    Pickle::parse(of_string, {.source = "x.pkl", .allowed_globals = kBoth});
  }));
}

}  // namespace pickle_test
}  // namespace ferry::distckpt
