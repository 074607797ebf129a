#include "distckpt/elements/arithmetic.h"

#include <array>
#include <cstdint>
#include <cstring>

#include "distckpt/base/error.h"
#include "distckpt/elements/cast.h"

namespace ferry::distckpt {

void add_number(DType dtype, std::span<std::byte> elements, int number) {
  require(is_floating_point(dtype) && can_cast(dtype, DType::kF64), ErrorKind::kLayout,
          "a number cannot be added to elements of {}", short_name(dtype));
  const auto size = static_cast<std::size_t>(size_of(dtype));
  for (std::size_t at = 0; at < elements.size(); at += size) {
    const auto element = elements.subspan(at, size);
    if (dtype == DType::kF64) {
      double value = 0;
      std::memcpy(&value, element.data(), sizeof value);
      value += number;
      std::memcpy(element.data(), &value, sizeof value);
      continue;
    }
    // torch adds in fp32, and rounds that.
    const auto sum =
        static_cast<float>(element_value(dtype, element.data())) + static_cast<float>(number);
    const auto bytes = std::as_bytes(std::span(&sum, 1));
    cast(DType::kF32, bytes, dtype, element, CastRule::kRound);
  }
}

void exclusive_or(std::span<std::byte> into, std::span<const std::byte> by) {
  auto* __restrict to = into.data();
  const auto* __restrict from = by.data();
  for (std::size_t i = 0; i < into.size(); ++i) to[i] ^= from[i];
}

}  // namespace ferry::distckpt
