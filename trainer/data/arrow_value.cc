#include "trainer/data/arrow_value.h"

#include <arrow/api.h>
#include <arrow/extension_type.h>
#include <arrow/util/float16.h>
#include <arrow/util/utf8.h>

#include <set>
#include <string_view>
#include <vector>

#include "distckpt/base/error.h"

namespace ferry::trainer {
namespace {

using arrow::Array;
using arrow::Type;

constexpr int kMaxDepth = 64;

template <typename ArrayType>
const ArrayType& as(const Array& array) {
  return static_cast<const ArrayType&>(array);
}

Record text(std::string_view bytes, const ColumnName& column) {
  require(arrow::util::ValidateUTF8(bytes), ErrorKind::kCorrupt, "{}: is not UTF-8", column.text());
  return std::string(bytes);
}

Record binary(std::string_view bytes) {
  return Record::binary(std::vector<std::uint8_t>(bytes.begin(), bytes.end()));
}

template <typename ListArray>
Record list(const Array& array, std::int64_t row, const ColumnName& column) {
  const auto& lists = as<ListArray>(array);
  auto values = Record::array();
  for (std::int64_t i = 0; i < lists.value_length(row); ++i)
    values.push_back(arrow_value(*lists.values(), lists.value_offset(row) + i, column));
  return values;
}

Record structure(const Array& array, std::int64_t row, const ColumnName& column) {
  const auto& structs = as<arrow::StructArray>(array);
  auto object = Record::object();
  for (int i = 0; i < structs.num_fields(); ++i) {
    const auto& name = structs.struct_type()->field(i)->name();
    object[name] = arrow_value(*structs.field(i), row, {.name = name, .parent = &column});
  }
  return object;
}

// A list of pairs, as pyarrow gives it: keys may repeat, and need not be text.
Record map(const Array& array, std::int64_t row, const ColumnName& column) {
  const auto& maps = as<arrow::MapArray>(array);
  auto pairs = Record::array();
  for (auto i = maps.value_offset(row); i < maps.value_offset(row) + maps.value_length(row); ++i) {
    auto pair = Record::array();
    pair.push_back(arrow_value(*maps.keys(), i, column));
    pair.push_back(arrow_value(*maps.items(), i, column));
    pairs.push_back(std::move(pair));
  }
  return pairs;
}

Record printed(const Array& array, std::int64_t row, const ColumnName& column) {
  const auto scalar = array.GetScalar(row);
  require(scalar.ok(), ErrorKind::kCorrupt, "{}: {}", column.text(), scalar.status().ToString());
  return (*scalar)->ToString();
}

bool is_printed(Type::type id) {
  switch (id) {
    case Type::DATE32:
    case Type::DATE64:
    case Type::TIMESTAMP:
    case Type::TIME32:
    case Type::TIME64:
    case Type::DURATION:
    case Type::DECIMAL32:
    case Type::DECIMAL64:
    case Type::DECIMAL128:
    case Type::DECIMAL256:
      return true;
    default:
      return false;
  }
}

bool is_plain(Type::type id) {
  return arrow::is_integer(id) || arrow::is_floating(id) || id == Type::BOOL || id == Type::NA ||
         arrow::is_base_binary_like(id) || id == Type::STRING_VIEW || id == Type::BINARY_VIEW ||
         id == Type::FIXED_SIZE_BINARY || is_printed(id);
}

bool has_parts(Type::type id) {
  return id == Type::LIST || id == Type::LARGE_LIST || id == Type::FIXED_SIZE_LIST ||
         id == Type::STRUCT || id == Type::MAP;
}

void require_readable_parts(const arrow::DataType& type, const std::string& column, int depth);

// The columns of a table, the members of a structure, the values of a list.
void require_readable_parts(const arrow::FieldVector& fields,
                            const std::string& parent,
                            int depth) {
  require(depth < kMaxDepth, ErrorKind::kUsage, "{}: is nested more than {} levels deep", parent,
          kMaxDepth);
  std::set<std::string_view> names;
  for (const auto& field : fields) {
    const auto& name = field->name();
    require(arrow::util::ValidateUTF8(name), ErrorKind::kCorrupt,
            "{}: the name of a column is not UTF-8", parent);
    require(names.insert(name).second, ErrorKind::kCorrupt, "{}: the column {} occurs twice",
            parent, name);
    require_readable_parts(*field->type(), fmt::format("{}: {}", parent, name), depth + 1);
  }
}

void require_readable_parts(const arrow::DataType& type, const std::string& column, int depth) {
  if (type.id() == Type::DICTIONARY) {
    require_readable_parts(*static_cast<const arrow::DictionaryType&>(type).value_type(), column,
                           depth);
  } else if (type.id() == Type::EXTENSION) {
    require_readable_parts(*static_cast<const arrow::ExtensionType&>(type).storage_type(), column,
                           depth);
  } else {
    require(is_plain(type.id()) || has_parts(type.id()), ErrorKind::kUsage,
            "{}: is of Arrow's type {}, which is not read", column, type.ToString());
    require_readable_parts(type.fields(), column, depth);
  }
}

}  // namespace

void require_readable(const arrow::Schema& schema, const std::string& file) {
  arrow::util::InitializeUTF8();  // before the first ValidateUTF8
  require_readable_parts(schema.fields(), file, 0);
}

std::string ColumnName::text() const {
  return parent == nullptr ? std::string(name) : fmt::format("{}.{}", parent->text(), name);
}

Record arrow_value(const Array& array, std::int64_t row, const ColumnName& column) {
  if (array.IsNull(row)) return nullptr;
  switch (array.type_id()) {
    case Type::BOOL:
      return as<arrow::BooleanArray>(array).Value(row);
    case Type::INT8:
      return as<arrow::Int8Array>(array).Value(row);
    case Type::INT16:
      return as<arrow::Int16Array>(array).Value(row);
    case Type::INT32:
      return as<arrow::Int32Array>(array).Value(row);
    case Type::INT64:
      return as<arrow::Int64Array>(array).Value(row);
    case Type::UINT8:
      return as<arrow::UInt8Array>(array).Value(row);
    case Type::UINT16:
      return as<arrow::UInt16Array>(array).Value(row);
    case Type::UINT32:
      return as<arrow::UInt32Array>(array).Value(row);
    case Type::UINT64:
      return as<arrow::UInt64Array>(array).Value(row);
    case Type::HALF_FLOAT:
      return arrow::util::Float16::FromBits(as<arrow::HalfFloatArray>(array).Value(row)).ToFloat();
    case Type::FLOAT:
      return as<arrow::FloatArray>(array).Value(row);
    case Type::DOUBLE:
      return as<arrow::DoubleArray>(array).Value(row);
    case Type::STRING:
      return text(as<arrow::StringArray>(array).GetView(row), column);
    case Type::LARGE_STRING:
      return text(as<arrow::LargeStringArray>(array).GetView(row), column);
    case Type::STRING_VIEW:
      return text(as<arrow::StringViewArray>(array).GetView(row), column);
    case Type::BINARY:
      return binary(as<arrow::BinaryArray>(array).GetView(row));
    case Type::LARGE_BINARY:
      return binary(as<arrow::LargeBinaryArray>(array).GetView(row));
    case Type::BINARY_VIEW:
      return binary(as<arrow::BinaryViewArray>(array).GetView(row));
    case Type::FIXED_SIZE_BINARY:
      return binary(as<arrow::FixedSizeBinaryArray>(array).GetView(row));
    case Type::LIST:
      return list<arrow::ListArray>(array, row, column);
    case Type::LARGE_LIST:
      return list<arrow::LargeListArray>(array, row, column);
    case Type::FIXED_SIZE_LIST:
      return list<arrow::FixedSizeListArray>(array, row, column);
    case Type::MAP:
      return map(array, row, column);
    case Type::STRUCT:
      return structure(array, row, column);
    case Type::DICTIONARY: {
      const auto& encoded = as<arrow::DictionaryArray>(array);
      return arrow_value(*encoded.dictionary(), encoded.GetValueIndex(row), column);
    }
    case Type::EXTENSION:
      return arrow_value(*as<arrow::ExtensionArray>(array).storage(), row, column);
    default:
      return printed(array, row, column);
  }
}

}  // namespace ferry::trainer
