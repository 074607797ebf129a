#include "distckpt/cast.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "distckpt/error.h"

namespace ferry::distckpt {
namespace {

// The upper bits of a NaN; quiet if the payload was all in the lower ones.
std::uint16_t nan_bits(std::uint32_t upper, std::uint32_t payload, std::uint32_t quiet) {
  return static_cast<std::uint16_t>((upper & payload) != 0 ? upper : upper | quiet);
}

// True if the two are the same value, and the same NaN.
bool same_value(double a, double b) {
  return a == b || (std::isnan(a) && std::isnan(b));
}
bool same_value(float a, float b) {
  return a == b ||
         (std::isnan(a) && std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b));
}

// The storage type of each dtype, and its conversions from and to float or double.
struct BF16 {
  using Bits = std::uint16_t;
  static float widen(Bits bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
  static Bits narrow(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    if (std::isnan(value)) return nan_bits(bits >> 16, 0x007FU, 0x0040U);
    return static_cast<Bits>((bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16);
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

template <typename Visit>
auto dispatch(DType dtype, Visit&& visit) {
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

template <typename From, typename Into>
std::optional<std::int64_t> cast_elements(std::span<const std::byte> from,
                                          std::span<std::byte> into,
                                          CastRule rule) {
  const auto count = from.size() / sizeof(typename From::Bits);
  require(into.size() == count * sizeof(typename Into::Bits), ErrorKind::kBug,
          "cast of {} elements into {} bytes", count, into.size());
  for (std::size_t i = 0; i < count; ++i) {
    typename From::Bits source;
    std::memcpy(&source, from.data() + i * sizeof(source), sizeof(source));
    const auto value = From::widen(source);
    typename Into::Bits result;
    if constexpr (std::is_same_v<Into, F64>) {
      result = value;
    } else {
      // From double by way of float, as torch does.
      result = Into::narrow(static_cast<float>(value));
    }
    const auto back = Into::widen(result);
    const bool refused = rule == CastRule::kExact
                             ? !same_value(static_cast<decltype(value)>(back), value)
                             : std::isinf(back) && !std::isinf(value);
    if (refused) return static_cast<std::int64_t>(i);
    std::memcpy(into.data() + i * sizeof(result), &result, sizeof(result));
  }
  return std::nullopt;
}

template <typename T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

double float8_value(std::uint8_t bits, int exponent_bits, bool has_infinity) {
  const int mantissa_bits = 7 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = (bits & 0x80) != 0 ? -1.0 : 1.0;
  if (has_infinity && exponent == (1 << exponent_bits) - 1) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  if (!has_infinity && (bits & 0x7F) == 0x7F) return std::numeric_limits<double>::quiet_NaN();
  const double fraction = exponent == 0 ? mantissa : mantissa + (1 << mantissa_bits);
  return sign * std::ldexp(fraction, std::max(exponent, 1) - bias - mantissa_bits);
}

// Bits of a float as an integer that counts representable values from zero.
template <typename Bits>
std::int64_t ordinal(Bits bits) {
  constexpr int kWidth = sizeof(Bits) * 8;
  const auto magnitude =
      static_cast<std::int64_t>(bits & static_cast<Bits>((Bits{1} << (kWidth - 1)) - 1));
  return (bits >> (kWidth - 1)) != 0 ? -magnitude : magnitude;
}

std::int64_t ordinal_of(DType dtype, const std::byte* element) {
  switch (size_of(dtype)) {
    case 1:
      return ordinal(load<std::uint8_t>(element));
    case 2:
      return ordinal(load<std::uint16_t>(element));
    case 4:
      return ordinal(load<std::uint32_t>(element));
    default:
      return ordinal(load<std::uint64_t>(element));
  }
}

}  // namespace

bool can_cast(DType from, DType to) {
  return from >= DType::kF16 && to >= DType::kF16;  // the last rows of the table: F16 to F64
}

std::optional<std::int64_t> cast(DType from_dtype,
                                 std::span<const std::byte> from,
                                 DType into_dtype,
                                 std::span<std::byte> into,
                                 CastRule rule) {
  return dispatch(from_dtype, [&](auto source) {
    return dispatch(into_dtype, [&](auto target) {
      return cast_elements<decltype(source), decltype(target)>(from, into, rule);
    });
  });
}

double element_value(DType dtype, const std::byte* element) {
  switch (dtype) {
    case DType::kBool:
    case DType::kU8:
      return load<std::uint8_t>(element);
    case DType::kI8:
      return load<std::int8_t>(element);
    case DType::kI16:
      return load<std::int16_t>(element);
    case DType::kI32:
      return load<std::int32_t>(element);
    case DType::kI64:
      return static_cast<double>(load<std::int64_t>(element));
    case DType::kF8E4M3:
      return float8_value(load<std::uint8_t>(element), 4, false);
    case DType::kF8E5M2:
      return float8_value(load<std::uint8_t>(element), 5, true);
    default:
      return dispatch(dtype, [&](auto kind) -> double {
        using Kind = decltype(kind);
        return Kind::widen(load<typename Kind::Bits>(element));
      });
  }
}

std::optional<std::uint64_t> ulp_distance(DType dtype, const std::byte* a, const std::byte* b) {
  if (!is_floating_point(dtype)) return std::nullopt;
  if (std::isnan(element_value(dtype, a)) || std::isnan(element_value(dtype, b))) {
    return std::nullopt;
  }
  const auto x = ordinal_of(dtype, a);
  const auto y = ordinal_of(dtype, b);
  // Unsigned, so that the distance of two doubles of opposite sign fits.
  return x > y ? static_cast<std::uint64_t>(x) - static_cast<std::uint64_t>(y)
               : static_cast<std::uint64_t>(y) - static_cast<std::uint64_t>(x);
}

}  // namespace ferry::distckpt
