// Element types and their three spellings: safetensors ("BF16"), torch ("bfloat16") and torch's
// storage classes.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace ferry::distckpt {

enum class DType : std::uint8_t {
  kBool,
  kU8,
  kI8,
  kI16,
  kI32,
  kI64,
  kF8E4M3,  // torch.float8_e4m3fn
  kF8E5M2,
  kF8E8M0,  // torch.float8_e8m0fnu: powers of two, the scales of blocks
  kF16,
  kBF16,
  kF32,
  kF64,
};

std::int64_t size_of(DType dtype);               // bytes of one element
std::string_view safetensors_name(DType dtype);  // "BF16"
std::string_view torch_name(DType dtype);        // "bfloat16"
std::string_view short_name(DType dtype);        // "bf16": what people type and tables show

// Empty for 8-bit floats: torch stores those as UntypedStorage.
std::string_view torch_storage_class(DType dtype);  // "BFloat16Storage"

std::optional<DType> dtype_from_safetensors(std::string_view name);
std::optional<DType> dtype_from_torch(std::string_view name);
std::optional<DType> dtype_from_storage_class(std::string_view name);
std::optional<DType> dtype_from_short_name(std::string_view name);

bool is_floating_point(DType dtype);

}  // namespace ferry::distckpt
