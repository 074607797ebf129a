#include "tests/support/naive_cast.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace ferry::support {

using distckpt::DType;

namespace {

#if defined(__aarch64__)
using Half = __fp16;  // GCC 12 has _Float16 in C++ on x86 alone
#else
using Half = _Float16;
#endif

template <typename T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

template <typename T>
void store(T value, std::byte* into) {
  std::memcpy(into, &value, sizeof(value));
}

float widen_bf16(std::uint32_t bits) {
  return std::bit_cast<float>(bits << 16);
}

// The nearer of the two neighbours; the even one if both are equally near.
std::uint16_t round_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto below = static_cast<std::uint16_t>(bits >> 16);
  if (std::isnan(value)) return static_cast<std::uint16_t>((below & 0x8000U) | 0x7FC0U);
  const auto rest = bits & 0xFFFFU;
  const bool up = rest > 0x8000U || (rest == 0x8000U && (below & 1U) != 0);
  return static_cast<std::uint16_t>(below + (up ? 1 : 0));
}

}  // namespace

double naive_value(DType dtype, const std::byte* element) {
  switch (dtype) {
    case DType::kF16:
      return static_cast<double>(load<Half>(element));
    case DType::kBF16:
      return static_cast<double>(widen_bf16(load<std::uint16_t>(element)));
    case DType::kF32:
      return static_cast<double>(load<float>(element));
    case DType::kF64:
      return load<double>(element);
    default:
      throw std::logic_error("no floating-point dtype");
  }
}

void naive_round(double value, DType dtype, std::byte* element) {
  const auto single = static_cast<float>(value);
  switch (dtype) {
    case DType::kF16:
      return store(static_cast<Half>(single), element);
    case DType::kBF16:
      return store(round_bf16(single), element);
    case DType::kF32:
      return store(single, element);
    case DType::kF64:
      return store(value, element);
    default:
      throw std::logic_error("no floating-point dtype");
  }
}

}  // namespace ferry::support
