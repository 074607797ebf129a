#include "distckpt/elements/cast.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "distckpt/base/error.h"
#include "distckpt/elements/float_kinds.h"

namespace ferry::distckpt {
namespace {

// True if the two are the same value, and the same NaN.
bool same_value(double a, double b) {
  return a == b || (std::isnan(a) && std::isnan(b));
}
bool same_value(float a, float b) {
  return (a == b) | (std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b));
}

bool is_infinite(double value) {
  return std::isinf(value);
}
bool is_infinite(float value) {
  return (std::bit_cast<std::uint32_t>(value) & 0x7FFFFFFFU) == 0x7F800000U;
}

template <typename T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

// Casts one element to `result` and says whether the rule refuses that.
template <typename From, typename Into>
bool cast_element(typename From::Bits source, typename Into::Bits& result, CastRule rule) {
  const auto value = From::widen(source);
  if constexpr (std::is_same_v<Into, F64>) {
    result = value;
  } else {
    result = Into::narrow(static_cast<float>(value));  // from double by way of float, as torch does
  }
  const auto back = Into::widen(result);
  return rule == CastRule::kExact ? !same_value(static_cast<decltype(value)>(back), value)
                                  : (int{is_infinite(back)} & int{!is_infinite(value)}) != 0;
}

// Casts all elements, and counts those that the rule refuses: a loop that leaves nowhere, of which
// compilers make vectors.
template <typename From, typename Into, CastRule kRule>
std::uint32_t cast_all(const std::byte* from, std::byte* into, std::size_t count) {
  std::uint32_t refused = 0;
  for (std::size_t i = 0; i < count; ++i) {
    typename Into::Bits result;
    refused += cast_element<From, Into>(
        load<typename From::Bits>(from + i * sizeof(typename From::Bits)), result, kRule);
    std::memcpy(into + i * sizeof(result), &result, sizeof(result));
  }
  return refused;
}

template <typename From, typename Into>
std::optional<std::int64_t> cast_elements(std::span<const std::byte> from,
                                          std::span<std::byte> into,
                                          CastRule rule) {
  const auto count = from.size() / sizeof(typename From::Bits);
  require(into.size() == count * sizeof(typename Into::Bits), ErrorKind::kBug,
          "cast of {} elements into {} bytes", count, into.size());
  const auto refused =
      rule == CastRule::kExact
          ? cast_all<From, Into, CastRule::kExact>(from.data(), into.data(), count)
          : cast_all<From, Into, CastRule::kRound>(from.data(), into.data(), count);
  if (refused == 0) return std::nullopt;
  for (std::size_t i = 0;; ++i) {
    typename Into::Bits result;
    const auto source = load<typename From::Bits>(from.data() + i * sizeof(typename From::Bits));
    if (cast_element<From, Into>(source, result, rule)) return static_cast<std::int64_t>(i);
  }
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

}  // namespace

bool can_cast(DType from, DType to) {
  return from >= DType::kF16 && to >= DType::kF16;  // the last rows of the table: F16 to F64
}

std::optional<std::int64_t> cast(DType from_dtype,
                                 std::span<const std::byte> from,
                                 DType into_dtype,
                                 std::span<std::byte> into,
                                 CastRule rule) {
  return dispatch_float(from_dtype, [&](auto source) {
    return dispatch_float(into_dtype, [&](auto target) {
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
    case DType::kF8E8M0: {
      const int exponent = load<std::uint8_t>(element);
      return exponent == 0xFF ? std::numeric_limits<double>::quiet_NaN()
                              : std::ldexp(1.0, exponent - 127);
    }
    default:
      return dispatch_float(dtype, [&](auto kind) -> double {
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
  switch (size_of(dtype)) {
    case 1:
      return ordinal_distance(load<std::uint8_t>(a), load<std::uint8_t>(b));
    case 2:
      return ordinal_distance(load<std::uint16_t>(a), load<std::uint16_t>(b));
    case 4:
      return ordinal_distance(load<std::uint32_t>(a), load<std::uint32_t>(b));
    default:
      return ordinal_distance(load<std::uint64_t>(a), load<std::uint64_t>(b));
  }
}

}  // namespace ferry::distckpt
