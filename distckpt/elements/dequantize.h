// Block-quantised weights: each block of elements (128 x 128, or 32 in a row) has a scale, and an
// element's value is its own times its block's scale. A tensor may have a second scale, of all of
// its blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "distckpt/base/box.h"
#include "distckpt/base/dtype.h"

namespace ferry::distckpt {

// A quantised element before its scale.
enum class Encoding : std::uint8_t {
  kE4M3,  // an F8_E4M3
  kE2M1,  // four bits: sign, two of exponent, one of mantissa; two in a byte, the lower bits first
  kInt4,  // four bits: an integer plus 8; eight in 32 bits, the lower bits first
};

// The elements that one element of the stored tensor packs: 1, 2 or 8.
std::int64_t pack_size(Encoding encoding);

// True if a stored tensor of that dtype holds such elements: F8_E4M3; U8 for two in a byte; I32.
bool holds(DType stored, Encoding encoding);

// F32, F16, BF16, F8_E4M3; U8 and F8_E8M0 hold exponents, whose bias is 127.
bool is_scale(DType dtype);

// The way in which scales of blocks meet, in fp32, the scale of the whole tensor, an F32.
enum class GlobalScale : std::uint8_t {
  kNone,
  kFactor,   // multiplied by it: ModelOpt's weight_scale_2
  kDivisor,  // divided by it: weight_global_scale of compressed-tensors
};

bool can_dequantize(DType from);  // F8_E4M3

// The scales of the blocks that a box touches.
struct BlockScales {
  DType dtype = DType::kF32;
  Dims block{};  // [128, 128]
  Box box{};     // of blocks
  std::span<const std::byte> packed{};
  GlobalScale how = GlobalScale::kNone;
  float global = 1.0F;
};

// The blocks that `box`, of elements, touches.
Box scales_of(const Box& box, const Dims& block);

// into = value * scale, multiplied in fp32 and rounded to `into_dtype` to nearest even, as
// DeepSeek-V3's weight_dequant does (inference/kernel.py), transformers with MXFP4
// (integrations/mxfp4.py), and compressed-tensors with INT4 and NVFP4
// (quantization/lifecycle/forward_helpers.py). NaN stays NaN. `box` begins and ends in its last
// dimension where packs do. Nothing, or the index of the first element that overflows `into_dtype`
// though its product is finite.
std::optional<std::int64_t> dequantize(const Box& box,
                                       Encoding encoding,
                                       std::span<const std::byte> from,
                                       const BlockScales& scales,
                                       DType into_dtype,
                                       std::span<std::byte> into);

}  // namespace ferry::distckpt
