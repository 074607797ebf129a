#include "trainer/data/jsonl_file.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/temp_dir.h"
#include "tests/trainer/data/read_all.h"

namespace ferry::trainer {
namespace jsonl_file_test {

using support::fails;

class JsonlFile : public testing::Test {
 protected:
  std::unique_ptr<RecordFile> open(std::string_view text) {
    distckpt::write_text(dir_ / "a.jsonl", text);
    return open_record_file(dir_ / "a.jsonl");
  }

  support::TempDir dir_;
};

TEST_F(JsonlFile, TakesEachLineThatIsNotEmpty) {
  const std::vector<std::string> expected{R"({"a":1})", R"({"b":"ü"})", R"({"c":[1,2]})"};
  EXPECT_EQ(read_all(*open("{\"a\":1}\n{\"b\":\"ü\"}\n{\"c\":[1,2]}\n")), expected);
  EXPECT_EQ(read_all(*open("{\"a\":1}\n{\"b\":\"ü\"}\n{\"c\":[1,2]}")), expected);
  EXPECT_EQ(read_all(*open("\n\n{\"a\":1}\r\n\r\n{\"b\":\"ü\"}\r\n\n{ \"c\": [1, 2]}\n\r\n\r")),
            expected);
}

TEST_F(JsonlFile, HasNoRecordsWhereThereIsNoText) {
  EXPECT_TRUE(open("")->chunks().empty());
  EXPECT_TRUE(read_all(*open("\n\r\n\n")).empty());
}

TEST_F(JsonlFile, SplitsIntoChunksByRecordsAndBytesAndLosesNone) {
  std::string text;
  std::vector<std::string> expected;
  for (int i = 0; i < 3000; ++i) {  // lines of up to 17 kB: some cross the blocks of the scan
    expected.push_back(
        fmt::format("{{\"i\":{},\"s\":\"{}\"}}", i, std::string(i % 50 == 0 ? 17'000 : 3, 'x')));
    text += expected.back() + (i % 3 == 0 ? "\n\n" : "\n");
  }
  expected.push_back(fmt::format("{{\"s\":\"{}\"}}", std::string(kJsonlChunkBytes + 9, 'y')));
  text += expected.back();
  const auto file = open(text);
  EXPECT_EQ(file->chunks().size(), 3U);
  EXPECT_EQ(file->chunks()[0].num_records, kJsonlChunkRecords);
  std::int64_t bytes = 0;
  for (const auto& chunk : file->chunks()) bytes += chunk.num_bytes;
  EXPECT_EQ(bytes, static_cast<std::int64_t>(text.size()));
  EXPECT_EQ(read_all(*file), expected);
}

TEST_F(JsonlFile, NamesTheLineOfARecord) {
  std::string text = "\n";
  for (int i = 0; i < 1500; ++i) text += "{}\n\r\n";
  const auto file = open(text);
  ASSERT_EQ(file->chunks().size(), 2U);
  EXPECT_EQ(file->open(0)->where(0), "line 2");
  EXPECT_EQ(file->open(1)->where(0), fmt::format("line {}", 2 + 2 * kJsonlChunkRecords));
}

TEST_F(JsonlFile, RefusesARecordThatIsNoObjectAndKeepsTheOthers) {
  const auto file = open("{\"a\":1}\n[1]\n{\"a\":1,\"a\":2}\n{\"a\":\n\"text\"\n{\"b\":2}\n{\"c\"");
  const auto chunk = file->open(0);
  ASSERT_EQ(file->chunks()[0].num_records, 7);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"array", "object"}, [&] { chunk->at(1); }));
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"\"a\" occurs twice"}, [&] { chunk->at(2); }));
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"byte 6"}, [&] { chunk->at(3); }));
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"string", "object"}, [&] { chunk->at(4); }));
  EXPECT_EQ(chunk->at(5), Record({{"b", 2}}));
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"byte 5"}, [&] { chunk->at(6); }));
}

TEST_F(JsonlFile, NamesAFileThatIsMissingOrOfNoKnownName) {
  EXPECT_TRUE(
      fails(ErrorKind::kNotFound, {"b.jsonl"}, [&] { open_record_file(dir_ / "b.jsonl"); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"b.csv", "by its name", ".parquet"},
                    [&] { open_record_file(dir_ / "b.csv"); }));
}

TEST_F(JsonlFile, RefusesAFileThatShrankOrChangedItsLines) {
  const auto file = open("{\"a\":1}\n{\"b\":2}\n");
  distckpt::write_text(dir_ / "a.jsonl", "{\"a\":1}{\"b\":2}\n\n");
  EXPECT_TRUE(fails(ErrorKind::kIo, {"a.jsonl", "changed"}, [&] { file->open(0); }));
  distckpt::write_text(dir_ / "a.jsonl", "{\"a\":1}\n");
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"a.jsonl"}, [&] { file->open(0); }));
}

}  // namespace jsonl_file_test
}  // namespace ferry::trainer
