// Parquet, read by Arrow's C++ library, which the pyarrow wheel carries. A chunk is a row group.
#pragma once

#include <filesystem>
#include <memory>

#include "trainer/data/record_file.h"

namespace ferry::trainer {

// Throws Error(kUsage) in a program that was built without Arrow, saying how to build it with.
std::unique_ptr<RecordFile> open_parquet_file(const std::filesystem::path& path);

}  // namespace ferry::trainer
