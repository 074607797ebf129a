// Files that Arrow writes, read, and damaged. tests/interop/train/test_training_data.py compares
// what is read with pyarrow's own reading.
#include "trainer/data/parquet_file.h"

#include <arrow/api.h>
#include <arrow/io/file.h>
#include <gtest/gtest.h>
#include <parquet/arrow/writer.h>

#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/temp_dir.h"
#include "tests/trainer/data/read_all.h"

namespace ferry::trainer {
namespace parquet_file_test {

using support::fails;

void ok(const arrow::Status& status) {
  require(status.ok(), ErrorKind::kBug, "{}", status.ToString());
}

// The rows {"text": "row 0", "numbers": [0, 1]}, ..., the list of each third one null.
std::filesystem::path write_table(const std::filesystem::path& path, int rows, int group_rows) {
  arrow::StringBuilder text;
  auto numbers = std::make_shared<arrow::Int64Builder>();
  arrow::ListBuilder lists(arrow::default_memory_pool(), numbers);
  for (int i = 0; i < rows; ++i) {
    ok(text.Append(fmt::format("row {}", i)));
    if (i % 3 == 2) {
      ok(lists.AppendNull());
      continue;
    }
    ok(lists.Append());
    ok(numbers->Append(i));
    ok(numbers->Append(i + 1));
  }
  const auto schema = arrow::schema(
      {arrow::field("text", arrow::utf8()), arrow::field("numbers", arrow::list(arrow::int64()))});
  const auto table = arrow::Table::Make(schema, {*text.Finish(), *lists.Finish()});
  const auto properties = parquet::WriterProperties::Builder().enable_page_checksum()->build();
  ok(parquet::arrow::WriteTable(*table, arrow::default_memory_pool(),
                                *arrow::io::FileOutputStream::Open(path.string()), group_rows,
                                properties));
  return path;
}

std::string expected_row(int i) {
  return fmt::format(R"({{"text":"row {0}","numbers":{1}}})", i,
                     i % 3 == 2 ? "null" : fmt::format("[{},{}]", i, i + 1));
}

TEST(ParquetFile, HasAChunkForEachRowGroup) {
  const support::TempDir dir;
  const auto file = open_record_file(write_table(dir / "a.parquet", 250, 100));
  ASSERT_EQ(file->chunks().size(), 3U);
  EXPECT_EQ(file->chunks()[2].num_records, 50);
  EXPECT_GT(file->chunks()[0].num_bytes, 500);
  EXPECT_EQ(file->open(1)->where(7), "row 107");
  const auto records = read_all(*file);
  ASSERT_EQ(records.size(), 250U);
  for (int i = 0; i < 250; ++i) EXPECT_EQ(records[static_cast<std::size_t>(i)], expected_row(i));
}

TEST(ParquetFile, MayHaveNoRows) {
  const support::TempDir dir;
  EXPECT_TRUE(read_all(*open_record_file(write_table(dir / "a.parquet", 0, 100))).empty());
}

TEST(ParquetFile, NamesWhatCannotBeRead) {
  const support::TempDir dir;
  EXPECT_TRUE(
      fails(ErrorKind::kNotFound, {"a.parquet"}, [&] { open_record_file(dir / "a.parquet"); }));
  distckpt::write_text(dir / "text.parquet", "{\"a\": 1}\n");
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"text.parquet", "cannot be read as Parquet"},
                    [&] { open_record_file(dir / "text.parquet"); }));
  distckpt::write_text(dir / "empty.parquet", "");
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"empty.parquet"},
                    [&] { open_record_file(dir / "empty.parquet"); }));
}

// The offset of the footer, whose length stands before the last four bytes.
std::size_t footer_of(std::span<const std::byte> file) {
  std::uint32_t length = 0;
  std::memcpy(&length, file.data() + file.size() - 8, sizeof length);
  return file.size() - 8 - length;
}

// Wherever a file is damaged or cut off: an error that names it. The pages of this one are under
// checksums, so that damage to them is seen unless it is to bytes that matter to nobody; the footer
// is not, and may come to say something else.
TEST(ParquetFile, SurvivesDamageAnywhere) {
  const support::TempDir dir;
  const auto path = write_table(dir / "a.parquet", 60, 20);
  const auto good = support::read_bytes(path);
  const auto records = read_all(*open_record_file(path));
  int refused = 0;
  const auto try_to_read = [&](std::size_t at) {
    try {
      const auto found = read_all(*open_record_file(path));
      if (at < footer_of(good)) {
        EXPECT_EQ(found, records) << "byte " << at;
      }
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("a.parquet"), std::string::npos) << error.what();
      ++refused;
    }
  };
  for (std::size_t at = 0; at < good.size(); at += 3) {
    auto bad = good;
    bad[at] ^= std::byte{0xff};
    support::write_bytes(path, bad);
    try_to_read(at);
  }
  EXPECT_GT(refused, static_cast<int>(good.size()) / 6);
  for (std::size_t size = 0; size < good.size(); size += 29) {
    support::write_bytes(path, std::span(good).first(size));
    EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"a.parquet"}, [&] {
      read_all(*open_record_file(path));
    })) << size;
  }
}

}  // namespace parquet_file_test
}  // namespace ferry::trainer
