#include "distckpt/base/dtype.h"

#include <array>

#include "distckpt/base/error.h"

namespace ferry::distckpt {
namespace {

struct Row {
  DType dtype;
  std::int64_t size;
  std::string_view safetensors;
  std::string_view torch;
  std::string_view storage;
  std::string_view short_name;
};

constexpr std::array kRows{
    Row{DType::kBool, 1, "BOOL", "bool", "BoolStorage", "bool"},
    Row{DType::kU8, 1, "U8", "uint8", "ByteStorage", "u8"},
    Row{DType::kI8, 1, "I8", "int8", "CharStorage", "i8"},
    Row{DType::kI16, 2, "I16", "int16", "ShortStorage", "i16"},
    Row{DType::kI32, 4, "I32", "int32", "IntStorage", "i32"},
    Row{DType::kI64, 8, "I64", "int64", "LongStorage", "i64"},
    Row{DType::kF8E4M3, 1, "F8_E4M3", "float8_e4m3fn", "", "fp8_e4m3"},
    Row{DType::kF8E5M2, 1, "F8_E5M2", "float8_e5m2", "", "fp8_e5m2"},
    Row{DType::kF8E8M0, 1, "F8_E8M0", "float8_e8m0fnu", "", "fp8_e8m0"},
    Row{DType::kF16, 2, "F16", "float16", "HalfStorage", "fp16"},
    Row{DType::kBF16, 2, "BF16", "bfloat16", "BFloat16Storage", "bf16"},
    Row{DType::kF32, 4, "F32", "float32", "FloatStorage", "fp32"},
    Row{DType::kF64, 8, "F64", "float64", "DoubleStorage", "fp64"},
};

const Row& row(DType dtype) {
  const auto& row = kRows.at(static_cast<std::size_t>(dtype));
  require(row.dtype == dtype, ErrorKind::kBug, "dtype table is out of order");
  return row;
}

std::optional<DType> find(std::string_view Row::*column, std::string_view name) {
  if (name.empty()) return std::nullopt;
  for (const auto& row : kRows) {
    if (row.*column == name) return row.dtype;
  }
  return std::nullopt;
}

}  // namespace

std::int64_t size_of(DType dtype) {
  return row(dtype).size;
}
std::string_view safetensors_name(DType dtype) {
  return row(dtype).safetensors;
}
std::string_view torch_name(DType dtype) {
  return row(dtype).torch;
}
std::string_view torch_storage_class(DType dtype) {
  return row(dtype).storage;
}
std::string_view short_name(DType dtype) {
  return row(dtype).short_name;
}

std::optional<DType> dtype_from_safetensors(std::string_view name) {
  return find(&Row::safetensors, name);
}
std::optional<DType> dtype_from_torch(std::string_view name) {
  return find(&Row::torch, name);
}
std::optional<DType> dtype_from_storage_class(std::string_view name) {
  return find(&Row::storage, name);
}
std::optional<DType> dtype_from_short_name(std::string_view name) {
  return find(&Row::short_name, name);
}

bool is_floating_point(DType dtype) {
  return dtype >= DType::kF8E4M3;
}

}  // namespace ferry::distckpt
