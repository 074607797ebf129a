// JSON Lines: an object a line. Lines that are empty are none; a malformed one is the trouble of
// its record alone.
#pragma once

#include <filesystem>
#include <memory>

#include "trainer/data/record_file.h"

namespace ferry::trainer {

// A chunk ends with the line that brings it to this many records or bytes.
inline constexpr std::int64_t kJsonlChunkRecords = 1024;
inline constexpr std::int64_t kJsonlChunkBytes = std::int64_t{4} << 20;

// Reads the file once, for the ends of its lines.
std::unique_ptr<RecordFile> open_jsonl_file(const std::filesystem::path& path);

}  // namespace ferry::trainer
