// Block-quantised weights: each block of elements (128 x 128) has a scale, and an element's value
// is its own times its block's scale.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "distckpt/base/box.h"
#include "distckpt/base/dtype.h"

namespace ferry::distckpt {

bool can_dequantize(DType from);  // F8_E4M3

// The scales of the blocks that a box touches.
struct BlockScales {
  DType dtype = DType::kF32;  // F32, F16 or BF16
  Dims block{};               // [128, 128]
  Box box{};                  // of blocks, in the scale tensor
  std::span<const std::byte> packed{};
};

// The part of the scale tensor that `box` (elements of the weight, rank 2) needs.
Box scales_of(const Box& box, const Dims& block);

// into = value * scale, multiplied in fp32 and rounded to `into_dtype` to nearest even, as
// DeepSeek-V3's weight_dequant does (inference/kernel.py). NaN stays NaN. Nothing, or the index of
// the first element that overflows `into_dtype` though its product is finite.
std::optional<std::int64_t> dequantize(const Box& box,
                                       DType from_dtype,
                                       std::span<const std::byte> from,
                                       const BlockScales& scales,
                                       DType into_dtype,
                                       std::span<std::byte> into);

}  // namespace ferry::distckpt
