// The floating-point dtypes that arithmetic is done in, as types: how an element is stored, and its
// conversions from and to float or double.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "distckpt/base/dtype.h"
#include "distckpt/base/error.h"

namespace ferry::distckpt {

// The upper bits of a NaN; quiet if the payload was all in the lower ones.
inline std::uint32_t nan_bits(std::uint32_t upper, std::uint32_t payload, std::uint32_t quiet) {
  return (upper & payload) != 0 ? upper : upper | quiet;
}

struct BF16 {
  using Bits = std::uint16_t;
  static float widen(Bits bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
  static Bits narrow(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const auto nan = nan_bits(bits >> 16, 0x007FU, 0x0040U);
    const auto rounded = (bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16;
    return static_cast<Bits>((bits & 0x7FFFFFFFU) > 0x7F800000U ? nan : rounded);
  }
};

struct F16 {
  using Bits = std::uint16_t;
  static float widen(Bits half) {
    const std::uint32_t sign = (half & 0x8000U) << 16;
    const std::uint32_t exponent = half >> 10 & 0x1FU;
    const std::uint32_t mantissa = half & 0x3FFU;
    if (exponent == 0) {  // zero and subnormals: mantissa * 2^-24, exact in float
      const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
      return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
    }
    if (exponent == 0x1F) return std::bit_cast<float>(sign | 0x7F800000U | mantissa << 13);
    return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  }
  static Bits narrow(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const auto sign = static_cast<Bits>(bits >> 16 & 0x8000U);
    const float magnitude = std::fabs(value);
    if (std::isnan(value))
      return static_cast<Bits>(sign | nan_bits(0x7C00U | (bits >> 13 & 0x3FFU), 0x03FFU, 0x0200U));
    if (magnitude >= 65520.0F) return static_cast<Bits>(sign | 0x7C00U);  // rounds beyond 65504
    if (magnitude < 0x1p-14F) {  // subnormal: a multiple of 2^-24; the sum below rounds to one
      const auto scaled = std::bit_cast<std::uint32_t>(magnitude + 0.5F);
      return static_cast<Bits>(sign | (scaled - std::bit_cast<std::uint32_t>(0.5F)));
    }
    const auto rounded = std::bit_cast<std::uint32_t>(magnitude);
    const auto half = (rounded - (112U << 23) + 0xFFFU + (rounded >> 13 & 1U)) >> 13;
    return static_cast<Bits>(sign | half);
  }
};

struct F32 {
  using Bits = float;
  static float widen(float value) { return value; }
  static float narrow(float value) { return value; }
};

struct F64 {
  using Bits = double;
  static double widen(double value) { return value; }
  static double narrow(double value) { return value; }
};

// Calls visit(BF16{}) for kBF16 and so on. Throws Error(kLayout) for other dtypes.
template <typename Visit>
auto dispatch_float(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::kF16:
      return visit(F16{});
    case DType::kBF16:
      return visit(BF16{});
    case DType::kF32:
      return visit(F32{});
    case DType::kF64:
      return visit(F64{});
    default:
      fail(ErrorKind::kLayout, "{} cannot be cast", short_name(dtype));
  }
}

}  // namespace ferry::distckpt
