#include "distckpt/base/dtype.h"

#include <gtest/gtest.h>

#include <array>
#include <set>
#include <string_view>

namespace ferry::distckpt {
namespace dtype_test {

constexpr std::array kAll{DType::kBool, DType::kU8,     DType::kI8,     DType::kI16,    DType::kI32,
                          DType::kI64,  DType::kF8E4M3, DType::kF8E5M2, DType::kF8E8M0, DType::kF16,
                          DType::kBF16, DType::kF32,    DType::kF64};

TEST(DType, ComesBackFromEachOfItsSpellings) {
  std::set<std::string_view> names;
  for (const auto dtype : kAll) {
    EXPECT_EQ(dtype_from_safetensors(safetensors_name(dtype)), dtype);
    EXPECT_EQ(dtype_from_torch(torch_name(dtype)), dtype);
    EXPECT_EQ(dtype_from_short_name(short_name(dtype)), dtype);
    names.insert(safetensors_name(dtype));
    const auto storage = torch_storage_class(dtype);
    if (storage.empty()) continue;
    EXPECT_EQ(dtype_from_storage_class(storage), dtype);
  }
  EXPECT_EQ(names.size(), kAll.size());
}

TEST(DType, HasTheSizeThatItsNameSays) {
  for (const auto dtype : kAll) {
    const auto name = safetensors_name(dtype);
    const auto bytes = name == "BOOL" || name.starts_with("F8") ? 1
                       : name.ends_with("64")                   ? 8
                       : name.ends_with("32")                   ? 4
                       : name.ends_with("16")                   ? 2
                                                                : 1;
    EXPECT_EQ(size_of(dtype), bytes) << name;
    EXPECT_EQ(is_floating_point(dtype), torch_name(dtype).find("float") != std::string_view::npos);
  }
}

TEST(DType, HasNoStorageClassInEightBitFloats) {
  EXPECT_EQ(torch_storage_class(DType::kF8E4M3), "");
  EXPECT_FALSE(dtype_from_storage_class("").has_value());
  EXPECT_FALSE(dtype_from_safetensors("bf16").has_value());
  EXPECT_FALSE(dtype_from_torch("BF16").has_value());
  EXPECT_FALSE(dtype_from_short_name("F4").has_value());
}

}  // namespace dtype_test
}  // namespace ferry::distckpt
