#include "trainer/data/parquet_file.h"

#include <arrow/api.h>
#include <arrow/io/file.h>
#include <parquet/arrow/reader.h>
#include <parquet/file_reader.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "trainer/data/arrow_value.h"

namespace ferry::trainer {
namespace {

void require_ok(const arrow::Status& status, const std::filesystem::path& path) {
  require(status.ok(), ErrorKind::kCorrupt, "{}: cannot be read as Parquet: {}", path.string(),
          status.message());
}

template <typename T>
T value_of(arrow::Result<T> result, const std::filesystem::path& path) {
  require_ok(result.status(), path);
  return std::move(result).MoveValueUnsafe();
}

// Translates exceptions of Arrow, which it throws where it does not return a status.
template <typename Body>
auto guarded(const std::filesystem::path& path, Body&& body) {
  try {
    return body();
  } catch (const Error&) {
    throw;
  } catch (const std::bad_alloc&) {
    fail(ErrorKind::kCorrupt,
         "{}: cannot be read as Parquet: it asks for more memory than there is", path.string());
  } catch (const std::exception& error) {
    fail(ErrorKind::kCorrupt, "{}: cannot be read as Parquet: {}", path.string(), error.what());
  }
}

class RowGroup : public Chunk {
 public:
  RowGroup(std::vector<std::shared_ptr<arrow::RecordBatch>> batches, std::int64_t first_row)
      : batches_(std::move(batches)), first_row_(first_row) {
    std::int64_t begin = 0;
    for (const auto& batch : batches_) {
      begins_.push_back(begin);
      begin += batch->num_rows();
    }
  }

  Record at(std::int64_t row) const override {
    const auto which = std::ranges::upper_bound(begins_, row) - begins_.begin() - 1;
    const auto& batch = *batches_.at(static_cast<std::size_t>(which));
    auto record = Record::object();
    for (int i = 0; i < batch.num_columns(); ++i) {
      const auto& name = batch.column_name(i);
      record[name] = arrow_value(*batch.column(i), row - begins_[static_cast<std::size_t>(which)],
                                 {.name = name});
    }
    return record;
  }

  std::string where(std::int64_t row) const override {
    return fmt::format("row {}", first_row_ + row);
  }

 private:
  std::vector<std::shared_ptr<arrow::RecordBatch>> batches_;
  std::vector<std::int64_t> begins_;  // the row of each batch's first
  std::int64_t first_row_;            // of the group, in the file
};

class ParquetFile : public RecordFile {
 public:
  explicit ParquetFile(const std::filesystem::path& path) : path_(path) {
    file_bytes_ = distckpt::ReadFile(path).size();  // names what is missing or no file
    guarded(path_, [&] { open_file(); });
  }

  const std::filesystem::path& path() const override { return path_; }
  std::int64_t file_bytes() const override { return file_bytes_; }
  const std::vector<ChunkSize>& chunks() const override { return chunks_; }

  std::unique_ptr<Chunk> open(std::size_t chunk) const override {
    return guarded(path_, [&] { return read_group(chunk); });
  }

 private:
  void open_file() {
    auto properties = parquet::default_reader_properties();
    properties.set_page_checksum_verification(true);  // of the pages that have one
    parquet::arrow::FileReaderBuilder builder;
    require_ok(
        builder.Open(value_of(arrow::io::ReadableFile::Open(path_.string()), path_), properties),
        path_);
    reader_ = value_of(builder.Build(), path_);
    std::shared_ptr<arrow::Schema> schema;
    require_ok(reader_->GetSchema(&schema), path_);
    require_readable(*schema, path_.string());
    const auto& metadata = *reader_->parquet_reader()->metadata();
    std::int64_t num_rows = 0;
    for (int i = 0; i < metadata.num_row_groups(); ++i) {
      const auto group = metadata.RowGroup(i);
      require(group->num_rows() >= 0, ErrorKind::kCorrupt, "{}: row group {} has {} rows",
              path_.string(), i, group->num_rows());
      chunks_.push_back({.num_records = group->num_rows(),
                         .num_bytes = std::max<std::int64_t>(0, group->total_byte_size())});
      first_rows_.push_back(num_rows);
      num_rows += group->num_rows();
    }
    require(num_rows == metadata.num_rows(), ErrorKind::kCorrupt,
            "{}: its row groups have {} rows, its footer says {}", path_.string(), num_rows,
            metadata.num_rows());
  }

  std::unique_ptr<Chunk> read_group(std::size_t chunk) const {
    const auto table = value_of(reader_->ReadRowGroup(static_cast<int>(chunk)), path_);
    require(table->num_rows() == chunks_.at(chunk).num_records, ErrorKind::kCorrupt,
            "{}: row group {} has {} rows, its footer says {}", path_.string(), chunk,
            table->num_rows(), chunks_[chunk].num_records);
    require_ok(table->Validate(), path_);
    auto batches = value_of(arrow::TableBatchReader(*table).ToRecordBatches(), path_);
    return std::make_unique<RowGroup>(std::move(batches), first_rows_[chunk]);
  }

  std::filesystem::path path_;
  std::int64_t file_bytes_ = 0;
  std::unique_ptr<parquet::arrow::FileReader> reader_;
  std::vector<ChunkSize> chunks_;
  std::vector<std::int64_t> first_rows_;  // of each row group
};

}  // namespace

std::unique_ptr<RecordFile> open_parquet_file(const std::filesystem::path& path) {
  return std::make_unique<ParquetFile>(path);
}

}  // namespace ferry::trainer
