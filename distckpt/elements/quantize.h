// Weights quantised by blocks: the way that dequantize.h comes back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "distckpt/base/dtype.h"

namespace ferry::distckpt {

inline constexpr std::int64_t kE4M3Block = 128;  // in both dimensions
inline constexpr std::int64_t kE2M1Block = 32;   // in the last one

// The scale of a block in F8_E4M3, of its largest magnitude / 448 in fp32; 1 where that is 0.
enum class E4M3Scale : std::uint8_t {
  kLargest,     // that itself
  kPowerOfTwo,  // the least power of two that is not below it
};

// [rows, columns] to F8_E4M3 in blocks of [block, block], ragged ones at the ends; an element is
// value / scale, rounded to nearest even. With kLargest bit for bit Megatron-Bridge's
// _quantize_fp8_2d_blocks (conversion/quantization_utils.py) and slime's
// tools/convert_hf_to_fp8.py, which leaves NaN where all are 0. With kPowerOfTwo no element may be
// rounded: of E2M1 elements that is bit for bit cast_e2m1fn_to_e4m3fn of DeepSeek-V4's
// inference/convert.py, where the group of the largest scale holds a 4 or a 6. `scales` has one
// element for each block. Nothing, or the index of an element that is not finite or would be
// rounded.
std::optional<std::int64_t> quantize_e4m3(E4M3Scale how,
                                          std::span<const float> values,
                                          std::int64_t columns,
                                          std::int64_t block,
                                          std::span<std::byte> into,
                                          std::span<float> scales);

// Rows and columns of a block.
struct BlockSize {
  std::int64_t rows = kE4M3Block;
  std::int64_t columns = kE4M3Block;
};

// [rows, columns] to F8_E4M3 by scales that there are: one for each block, finite and positive
// unless its elements are all 0; an element is value / scale, rounded to nearest even. A block gets
// another scale where its own brings an element above 464, which is no number of E4M3: its largest
// magnitude / 448, rounded to `scale_dtype` (F32, BF16, F16), or, if its own is a power of two, the
// least power of two that is not below that. Values are finite.
void requantize_e4m3(std::span<const float> values,
                     std::int64_t columns,
                     const BlockSize& block,
                     DType scale_dtype,
                     std::span<float> scales,
                     std::span<std::byte> into);

// [rows, columns] to MXFP4: 32 elements of a row have one scale, the least power of two that brings
// the largest magnitude to at most 6, or 1 where that is 0; an element is the nearest that four
// bits have, the smaller one of two: bit for bit Megatron-Bridge's quantize_mxfp4_e2m1_like_scale
// where values are bf16. `into` has two elements a byte, the first one in the lower bits;
// `exponents` have a bias of 127. `columns` is a multiple of 32. Nothing, or the index of an
// element that is not finite.
std::optional<std::int64_t> quantize_e2m1(std::span<const float> values,
                                          std::span<std::byte> into,
                                          std::span<std::byte> exponents);

}  // namespace ferry::distckpt
