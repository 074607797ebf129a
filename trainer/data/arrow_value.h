// Values of Arrow's columns as JSON: what Python's pyarrow calls to_pylist(), except that dates,
// times and decimals are text.
#pragma once

#include <arrow/type_fwd.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "trainer/data/record_file.h"

namespace ferry::trainer {

// Throws Error(kUsage) "<file>: <column>: ..." for types that have no value in JSON,
// Error(kCorrupt) for names that occur twice or are no text.
void require_readable(const arrow::Schema& schema, const std::string& file);

// The name of a column or of a member of one, put together only where an error tells it.
struct ColumnName {
  std::string_view name{};
  const ColumnName* parent = nullptr;
  std::string text() const;  // "extra_info.split"
};

// Throws Error(kCorrupt) "<column>: ..." for text that is not UTF-8.
Record arrow_value(const arrow::Array& array, std::int64_t row, const ColumnName& column);

}  // namespace ferry::trainer
