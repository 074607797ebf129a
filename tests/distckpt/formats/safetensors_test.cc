#include "distckpt/formats/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/random_boxes.h"
#include "tests/support/sha256.h"
#include "tests/support/temp_dir.h"

namespace ferry::distckpt {
namespace safetensors_test {

namespace fs = std::filesystem;
using support::fails;
using support::Random;
using support::TempDir;
using support::test_data;

constexpr std::array kFixtures{"hf_llama", "hf_qwen2", "hf_qwen2_tied", "hf_qwen3"};

std::string u64(std::uint64_t value) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(value >> (8 * i) & 0xFF));
  return bytes;
}

// A file of that header and that many bytes of data.
fs::path write_file(const TempDir& dir, const std::string& header, std::size_t data) {
  auto path = dir / "model.safetensors";
  support::write_bytes(path, as_bytes(u64(header.size()) + header + std::string(data, 'x')));
  return path;
}

std::string entry(const std::string& name,
                  const std::string& dtype,
                  const std::string& shape,
                  const std::string& offsets) {
  return fmt::format(R"("{}":{{"dtype":{},"shape":{},"data_offsets":{}}})", name, dtype, shape,
                     offsets);
}

// --- What the library wrote ---

TEST(Safetensors, WritesTheHeaderThatTheLibraryWrites) {
  Random random(1);
  for (const auto* name : kFixtures) {
    const auto found = read_safetensors_header(test_data(name) / "hf/model.safetensors");
    auto entries = found.entries;
    random.shuffle(entries);
    const auto made = make_safetensors_header("model.safetensors", entries, found.metadata);
    EXPECT_EQ(made.prefix, found.prefix) << name;
    EXPECT_EQ(made.file_size, found.file_size) << name;
    ASSERT_EQ(made.entries.size(), found.entries.size());
    for (std::size_t i = 0; i < made.entries.size(); ++i) {
      EXPECT_EQ(made.entries[i].name, found.entries[i].name);
      EXPECT_EQ(made.entries[i].begin, found.entries[i].begin);
      EXPECT_EQ(made.entries[i].end, found.entries[i].end);
    }
  }
}

TEST(Safetensors, ReadsTheTensorsThatTransformersSaved) {
  const auto path = test_data("hf_llama") / "hf/model.safetensors";
  const auto stated =
      nlohmann::json::parse(read_text(test_data("llama_tp1") / "sha256.json")).at("hf");
  const auto header = read_safetensors_header(path);
  const ReadFile file(path);
  ASSERT_EQ(header.entries.size(), stated.size());
  for (const auto& tensor : header.entries) {
    const auto& expected = stated.at(tensor.name);
    EXPECT_EQ(torch_name(tensor.dtype), expected.at("dtype").get<std::string>());
    EXPECT_EQ(to_string(tensor.shape),
              fmt::format("[{}]", fmt::join(expected.at("shape").get<std::vector<int>>(), ", ")));
    std::vector<std::byte> bytes(static_cast<std::size_t>(tensor.end - tensor.begin));
    file.read_at(tensor.begin, bytes);
    EXPECT_EQ(support::sha256(bytes), expected.at("sha256").get<std::string>()) << tensor.name;
  }
}

// --- Headers of our own ---

TEST(Safetensors, OrdersByDTypeThenName) {
  // The order of the library's enum Dtype: the widest first, and names within.
  const auto header = make_safetensors_header("m",
                                              {{.name = "b", .dtype = DType::kBF16, .shape = {3}},
                                               {.name = "a", .dtype = DType::kBF16, .shape = {3}},
                                               {.name = "z", .dtype = DType::kI64, .shape = {1}},
                                               {.name = "c", .dtype = DType::kF32, .shape = {}},
                                               {.name = "d", .dtype = DType::kU8, .shape = {0, 7}}},
                                              {});
  std::string names;
  for (const auto& one : header.entries) names += one.name;
  EXPECT_EQ(names, "zcabd");
  EXPECT_EQ(header.prefix.size() % 8, 0U);
  EXPECT_EQ(header.file_size, static_cast<std::int64_t>(header.prefix.size()) + 8 + 4 + 6 + 6);
}

TEST(Safetensors, ReadsWhatItWrote) {
  Random random(2);
  constexpr std::array kDTypes{DType::kBool,   DType::kU8,     DType::kI8,  DType::kI16,
                               DType::kI32,    DType::kI64,    DType::kF16, DType::kBF16,
                               DType::kF8E4M3, DType::kF8E5M2, DType::kF32, DType::kF64};
  for (int i = 0; i < 200; ++i) {
    std::vector<SafetensorsEntry> tensors;
    for (auto count = random.between(0, 20); count > 0; --count) {
      const auto kind = static_cast<std::size_t>(random.between(0, std::ssize(kDTypes) - 1));
      tensors.push_back(
          {.name = fmt::format("a \"name\" of ümlauts \\{}", count),
           .dtype = kDTypes[kind],
           .shape = support::random_shape(random, static_cast<int>(random.between(0, 6)), 0, 4)});
    }
    std::map<std::string, std::string> metadata;
    if (random.chance(50)) metadata = {{"format", "pt"}, {"\n", "\t\""}};
    const auto made = make_safetensors_header("m", tensors, metadata);
    const TempDir dir;
    const auto payload_bytes = made.file_size - std::ssize(made.prefix);
    const std::string payload(static_cast<std::size_t>(payload_bytes), 'x');
    support::write_bytes(dir / "m", as_bytes(made.prefix + payload));
    const auto found = read_safetensors_header(dir / "m");
    EXPECT_EQ(found.prefix, made.prefix);
    EXPECT_EQ(found.metadata, metadata);
    EXPECT_EQ(found.file_size, made.file_size);
    ASSERT_EQ(found.entries.size(), tensors.size());
    for (const auto& one : made.entries) {
      const auto same = std::ranges::find(found.entries, one.name, &SafetensorsEntry::name);
      ASSERT_NE(same, found.entries.end()) << one.name;
      EXPECT_EQ(same->dtype, one.dtype);
      EXPECT_EQ(same->shape, one.shape);
      EXPECT_EQ(same->begin, one.begin);
      EXPECT_EQ(same->end, one.end);
    }
  }
}

// The library's own headers, which are read faster, and the same JSON laid out otherwise.
TEST(Safetensors, ReadsAHeaderLaidOutInAnyWayAlike) {
  for (const auto* name : kFixtures) {
    const auto path = test_data(name) / "hf/model.safetensors";
    const auto plain = read_safetensors_header(path);
    const auto json = nlohmann::json::parse(plain.prefix.substr(8));
    for (const auto& text : {json.dump(), json.dump(1), " " + plain.prefix.substr(8)}) {
      const auto data = plain.file_size - std::ssize(plain.prefix);
      const auto size = 8 + std::ssize(text);
      const auto found = parse_safetensors_prefix(u64(text.size()) + text, "m", "m", size + data);
      EXPECT_EQ(found.metadata, plain.metadata);
      EXPECT_EQ(found.file_size - size, data);
      ASSERT_EQ(found.entries.size(), plain.entries.size());
      for (std::size_t i = 0; i < found.entries.size(); ++i) {
        const auto &one = found.entries[i], &other = plain.entries[i];
        EXPECT_EQ(one.name, other.name);
        EXPECT_EQ(one.dtype, other.dtype);
        EXPECT_EQ(one.shape, other.shape);
        EXPECT_EQ(one.begin - size, other.begin - std::ssize(plain.prefix)) << one.name;
        EXPECT_EQ(one.end - size, other.end - std::ssize(plain.prefix)) << one.name;
      }
    }
  }
}

TEST(Safetensors, AddsItsTensorsToALayout) {
  const auto folder = test_data("hf_llama") / "hf";
  const auto header = read_safetensors_header(folder / "model.safetensors");
  Layout layout;
  add_to_layout(header, folder, layout);
  EXPECT_NO_THROW(check_layout(layout));
  const auto index = layout.find("model.embed_tokens.weight");
  ASSERT_TRUE(index.has_value());
  EXPECT_EQ(layout.tensor(*index).shape, (Shape{250, 32}));
  EXPECT_EQ(layout.tensor(*index).shards[0].at.strides, (Dims{64, 2}));
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"lm_head.weight", "twice", "model.safetensors"},
                    [&] { add_to_layout(header, folder, layout); }));
}

// --- What is refused ---

struct Malformed {
  std::string header;
  std::string tensor;   // that the message names
  std::string message;  // what it says
};

class SafetensorsMalformed : public testing::TestWithParam<Malformed> {};

TEST_P(SafetensorsMalformed, IsRefusedNamingFileAndTensor) {
  const auto& [header, tensor, message] = GetParam();
  const TempDir dir;
  const auto path = write_file(dir, header, 16);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {path.c_str(), tensor, message}, [&] {
    read_safetensors_header(path);
  })) << header;
}

INSTANTIATE_TEST_SUITE_P(
    Entry,
    SafetensorsMalformed,
    testing::Values(
        Malformed{"{" + entry("a", "\"F32\"", "[2]", "[0,4]") + "}", "a", "takes 8 bytes"},
        Malformed{"{" + entry("a", "\"F32\"", "[2]", "[8,0]") + "}", "a", "takes 8 bytes"},
        Malformed{"{" + entry("a", "\"F32\"", "[20]", "[0,80]") + "}", "a", "ends at byte 80"},
        Malformed{"{" + entry("a", "\"F32\"", "[2]", "[0,8]") + "}", "a", "ends at byte"},
        Malformed{"{" + entry("a", "\"F32\"", "[3]", "[4,16]") + "}", "a", "begins at byte 4"},
        Malformed{"{" + entry("a", "\"F99\"", "[4]", "[0,16]") + "}", "a", "unknown dtype \"F99\""},
        Malformed{"{" + entry("a", "32", "[4]", "[0,16]") + "}", "a", "a string is expected"},
        Malformed{"{" + entry("a", "\"F32\"", "[-4]", "[0,16]") + "}", "a", "holds -4"},
        Malformed{"{" + entry("a", "\"F32\"", "[4.0]", "[0,16]") + "}", "a", "an integer"},
        Malformed{"{" + entry("a", "\"F32\"", "[\"4\"]", "[0,16]") + "}", "a", "an integer"},
        Malformed{"{" + entry("a", "\"F32\"", "4", "[0,16]") + "}", "a", "not a list"},
        Malformed{"{" + entry("a", "\"F32\"", "null", "[0,16]") + "}", "a", "not a list"},
        Malformed{"{" + entry("a", "\"F32\"", "[4]", "[0]") + "}", "a", "not a pair"},
        Malformed{"{" + entry("a", "\"F32\"", "[4]", "[0,16,16]") + "}", "a", "not a pair"},
        Malformed{"{" + entry("a", "\"F32\"", "[4]", "[-1,15]") + "}", "a", "holds -1"},
        Malformed{"{" + entry("a", "\"F32\"", "[4611686018427387904,4]", "[0,16]") + "}", "a",
                  "overflows"},
        Malformed{"{" + entry("a", "\"F32\"", "[4611686018427387904]", "[0,16]") + "}", "a",
                  "overflows"},
        Malformed{"{" + entry("a", "\"F32\"", "[0,4294967296,4294967296]", "[0,0]") + "}", "a",
                  "overflows"},
        Malformed{"{" + entry("a", "\"F32\"", "[18446744073709551615]", "[0,16]") + "}", "a",
                  "too large"},
        Malformed{
            "{" + entry("a", "\"U8\"", "[9223372036854775807]", "[0,9223372036854775807]") + "}",
            "a", ""},
        Malformed{"{" + entry("a", "\"F32\"", "[1,1,1,1,1,1,4]", "[0,16]") + "}", "a", "at most 6"},
        Malformed{R"({"a":{"dtype":"F32","shape":[4]}})", "a", "\"data_offsets\" is missing"},
        Malformed{R"({"a":{"dtype":"F32","data_offsets":[0,16]}})", "a", "\"shape\" is missing"},
        Malformed{R"({"a":{"shape":[4],"data_offsets":[0,16]}})", "a", "\"dtype\" is missing"},
        Malformed{R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16],"device":"cpu"}})", "a",
                  "other fields"},
        Malformed{"{" + entry("a", "\"F32\"", "[04]", "[0,16]") + "}", "", "not valid JSON"},
        Malformed{"{" + entry("a", "\"F32\"", "[4,]", "[0,16]") + "}", "", "not valid JSON"},
        Malformed{"{" + entry("a", "\"F32\"", "[4]", "[0,16") + "}", "", "not valid JSON"},
        Malformed{"{" + entry("a\t", "\"F32\"", "[4]", "[0,16]") + "}", "", "not valid JSON"},
        Malformed{"{" + entry("a", "\"F32\"", "[4]", "[0,16]") + "} x", "", "not valid JSON"},
        Malformed{R"({"a":[1,2,3]})", "a", "not a JSON object"},
        Malformed{R"({"a":null})", "a", "not a JSON object"}));

INSTANTIATE_TEST_SUITE_P(
    File,
    SafetensorsMalformed,
    testing::Values(
        Malformed{"{" + entry("a", "\"F32\"", "[2]", "[0,8]") + "," +
                      entry("b", "\"F32\"", "[2]", "[4,12]") + "}",
                  "b", "begins at byte 4"},
        Malformed{"{" + entry("a", "\"F32\"", "[1]", "[0,4]") + "," +
                      entry("b", "\"F32\"", "[2]", "[8,16]") + "}",
                  "b", "begins at byte 8"},
        Malformed{"{" + entry("a", "\"F32\"", "[4]", "[0,16]") + "," +
                      entry("a", "\"F32\"", "[4]", "[0,16]") + "}",
                  "a", "occurs twice"},
        Malformed{"{" + entry("a", "\"F32\"", "[4]", "[0,16]") + "," +
                      entry("b", "\"U8\"", "[9223372036854775807]", "[16,9223372036854775823]") +
                      "}",
                  "b", ""},
        Malformed{"[]", "", "not a JSON object"},
        Malformed{"3", "", "not a JSON object"},
        Malformed{"{", "", "not valid JSON"},
        Malformed{"{}{}", "", "not valid JSON"},
        Malformed{"", "", "not valid JSON"},
        Malformed{"{}", "", "26 bytes long"},
        Malformed{R"({"__metadata__":3})", "__metadata__", "not an object"},
        Malformed{R"({"__metadata__":{"format":1}})", "format", "a string is expected"},
        Malformed{R"({"__metadata__":{"a":"b","a":"c"}})", "a", "occurs twice"}));

TEST(Safetensors, RefusesALengthThatPromisesTerabytes) {
  const TempDir dir;
  for (const auto length :
       {std::uint64_t{1} << 42, ~std::uint64_t{0}, std::uint64_t{1} << 63, std::uint64_t{3}}) {
    write_text(dir / "a", u64(length) + "{}");
    EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"/a: byte 0", std::to_string(length)},
                      [&] { read_safetensors_header(dir / "a"); }));
  }
}

TEST(Safetensors, RefusesAFileThatIsShorterThanItsHeaderAtEveryByte) {
  const TempDir dir;
  fs::copy_file(test_data("hf_llama") / "hf/model.safetensors", dir / "m");
  const auto whole = read_safetensors_header(dir / "m");
  for (auto size = static_cast<std::int64_t>(whole.prefix.size()); size >= 0; size -= 7) {
    support::cut(dir / "m", size);
    ASSERT_TRUE(fails(ErrorKind::kCorrupt, {"/m"}, [&] { read_safetensors_header(dir / "m"); }))
        << size;
  }
}

TEST(Safetensors, RefusesAFileThatIsLongerThanItsTensors) {
  const TempDir dir;
  fs::copy_file(test_data("hf_llama") / "hf/model.safetensors", dir / "m");
  support::append(dir / "m", "x");
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"/m", "bytes long", "model.norm.weight"},
                    [&] { read_safetensors_header(dir / "m"); }));
}

// A mutated header is refused, or describes tensors that lie inside the file without overlapping.
TEST(Safetensors, SurvivesMutations) {
  const auto original =
      read_safetensors_header(test_data("hf_llama") / "hf/model.safetensors").prefix;
  Random random(3);
  int refused = 0;
  for (int i = 0; i < 5000; ++i) {
    auto header = original.substr(8);
    for (auto edits = random.between(1, 3); edits > 0; --edits) {
      const auto at = static_cast<std::size_t>(random.between(0, std::ssize(header) - 1));
      switch (random.between(0, 3)) {
        case 0:
          header[at] = static_cast<char>(random.bits());
          break;
        case 1:
          header.erase(at, static_cast<std::size_t>(random.between(1, 40)));
          break;
        case 2:
          header.insert(at, header.substr(static_cast<std::size_t>(random.between(0, 1000)),
                                          static_cast<std::size_t>(random.between(1, 40))));
          break;
        default:  // a digit for a digit: valid JSON of wrong numbers
          header[at] = header[at] >= '0' && header[at] <= '9'
                           ? static_cast<char>('0' + random.between(0, 9))
                           : header[at];
      }
    }
    try {
      const auto found = parse_safetensors_prefix(u64(header.size()) + header, "m", "m");
      auto position = static_cast<std::int64_t>(found.prefix.size());
      for (const auto& one : found.entries) {
        ASSERT_EQ(one.begin, position);
        ASSERT_EQ(one.end - one.begin, one.shape.product() * size_of(one.dtype));
        position = one.end;
      }
      ASSERT_EQ(found.file_size, position);
    } catch (const Error& error) {
      ASSERT_EQ(error.kind(), ErrorKind::kCorrupt) << error.report();
      ++refused;
    }
  }
  EXPECT_GT(refused, 3000);
}

}  // namespace safetensors_test
}  // namespace ferry::distckpt
