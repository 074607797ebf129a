// Reads all of a file of records, for tests.
#pragma once

#include <string>
#include <vector>

#include "trainer/data/record_file.h"

namespace ferry::trainer {

// Every record, chunk after chunk, as its text.
inline std::vector<std::string> read_all(const RecordFile& file) {
  std::vector<std::string> records;
  for (std::size_t i = 0; i < file.chunks().size(); ++i) {
    const auto chunk = file.open(i);
    for (std::int64_t row = 0; row < file.chunks()[i].num_records; ++row)
      records.push_back(chunk->at(row).dump());
  }
  return records;
}

}  // namespace ferry::trainer
