// Files of records, read in chunks: runs of lines of JSONL, row groups of Parquet. One scan, or the
// footer, says how many records lie where; only chunks that somebody holds are in memory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace ferry::trainer {

// One row: an object whose members are the columns. Parquet's bytes are JSON's binary values; its
// dates, times and decimals are text.
using Record = nlohmann::ordered_json;

struct ChunkSize {
  std::int64_t num_records = 0;
  std::int64_t num_bytes = 0;  // in memory; of Parquet what its footer says before compression
  bool operator==(const ChunkSize&) const = default;
};

// A chunk in memory.
class Chunk {
 public:
  virtual ~Chunk() = default;

  // Throws Error(kCorrupt) if the row is malformed: the others are not.
  virtual Record at(std::int64_t row) const = 0;

  virtual std::string where(std::int64_t row) const = 0;  // in the file: "line 17", "row 16"
};

class RecordFile {
 public:
  virtual ~RecordFile() = default;

  virtual const std::filesystem::path& path() const = 0;
  virtual std::int64_t file_bytes() const = 0;
  virtual const std::vector<ChunkSize>& chunks() const = 0;

  // Throws Error(kCorrupt | kIo) that names the file.
  virtual std::unique_ptr<Chunk> open(std::size_t chunk) const = 0;
};

// The name decides: .jsonl, .ndjson and .json hold an object a line, .parquet a table. Throws
// Error(kUsage | kNotFound | kCorrupt | kIo) that names the file.
std::unique_ptr<RecordFile> open_record_file(const std::filesystem::path& path);

}  // namespace ferry::trainer
