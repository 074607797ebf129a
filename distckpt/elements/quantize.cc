#include "distckpt/elements/quantize.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "distckpt/elements/cast.h"

namespace ferry::distckpt {
namespace {

constexpr float kE4M3Max = 448.0F;
constexpr float kE4M3Bound = 464.0F;  // the last that is rounded to it
constexpr float kE2M1Max = 6.0F;
constexpr int kScaleBias = 127;

std::optional<std::int64_t> first_not_finite(std::span<const float> values) {
  const auto found =
      std::ranges::find_if(values, [](float value) { return !std::isfinite(value); });
  if (found == values.end()) return std::nullopt;
  return found - values.begin();
}

// Rounds to nearest even, of magnitudes up to 464; has no branch, so that a compiler makes vectors
// of it. Adding 2^14 to what is below the smallest normal, 2^-6, rounds it to a multiple of 2^-9.
std::uint32_t to_e4m3(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto magnitude = bits & 0x7FFFFFFFU;
  constexpr std::uint32_t kRounder = (127U + 14U) << 23U;
  const auto small = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) +
                                                  std::bit_cast<float>(kRounder)) -
                     kRounder;
  const auto odd = magnitude >> 20U & 1U;
  const auto normal = (magnitude - (120U << 23U) + 0x7FFFFU + odd) >> 20U;
  return (magnitude < (121U << 23U) ? small : normal) | (bits >> 24U & 0x80U);
}

// True if it is a number of E4M3; of magnitudes up to 448.
bool is_e4m3(float value) {
  constexpr float kSmallestNormal = 0x1p-6F;
  if (std::abs(value) < kSmallestNormal) return std::trunc(value * 0x1p9F) == value * 0x1p9F;
  return (std::bit_cast<std::uint32_t>(value) & 0xFFFFFU) == 0;
}

// The exponent of the least power of two that is at least `value`, which is positive.
int ceil_exponent(float value) {
  int exponent = 0;
  const float fraction = std::frexp(value, &exponent);  // [0.5, 1)
  return fraction == 0.5F ? exponent - 1 : exponent;
}

// Calls visit(first element, count, index of the block) for each run of a row in one block.
template <typename Visit>
void for_each_run(std::int64_t rows,
                  std::int64_t columns,
                  const BlockSize& block,
                  const Visit& visit) {
  const auto per_row = ceil_div(columns, block.columns);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t b = 0; b < per_row; ++b) {
      const auto first = b * block.columns;
      visit(static_cast<std::size_t>(r * columns + first),
            static_cast<std::size_t>(std::min(block.columns, columns - first)),
            static_cast<std::size_t>(r / block.rows * per_row + b));
    }
  }
}

float power_of_two_from(float value) {
  return std::ldexp(1.0F, std::max(ceil_exponent(value), -kScaleBias + 1));
}

// The scale of a block of that largest magnitude in the place of `old`.
float wider_scale(float largest, float old, DType dtype) {
  const float scale = largest / kE4M3Max;
  int exponent = 0;
  const auto refuse = [&] {
    fail(ErrorKind::kLayout, "a block with {} is beyond scales of {}", largest, short_name(dtype));
  };
  if (old > 0 && std::frexp(old, &exponent) == 0.5F) {
    const float power = power_of_two_from(scale);
    if (dtype != DType::kF16) return power;
    if (power > 0x1p15F) refuse();
    return std::max(power, 0x1p-24F);
  }
  if (largest == 0) return 1.0F;
  float rounded = scale;
  std::uint16_t bits = 0;  // of a positive number of 16 bits, whose successor has the next
  const auto half = std::as_writable_bytes(std::span(&bits, 1));
  const auto widen = [&] {
    if (dtype != DType::kF32)
      cast(dtype, half, DType::kF32, std::as_writable_bytes(std::span(&rounded, 1)),
           CastRule::kExact);
  };
  if (dtype != DType::kF32) {
    const auto refused =
        cast(DType::kF32, std::as_bytes(std::span(&scale, 1)), dtype, half, CastRule::kRound);
    if (refused) refuse();
  }
  widen();
  while (rounded == 0 || largest / rounded > kE4M3Bound) {
    if (dtype == DType::kF32) rounded = std::nextafter(rounded, kE4M3Max);
    ++bits;
    widen();
  }
  return rounded;
}

// Between each number of four bits and the next.
constexpr std::array<float, 7> kE2M1Bounds{0.25F, 0.75F, 1.25F, 1.75F, 2.5F, 3.5F, 5.0F};

std::uint32_t to_e2m1(float value) {
  std::uint32_t code = 0;
  for (const float bound : kE2M1Bounds) code += static_cast<std::uint32_t>(std::abs(value) > bound);
  return code | (value < 0 ? 8U : 0U);
}

}  // namespace

std::optional<std::int64_t> quantize_e4m3(E4M3Scale how,
                                          std::span<const float> values,
                                          std::int64_t columns,
                                          std::int64_t block,
                                          std::span<std::byte> into,
                                          std::span<float> scales) {
  if (const auto refused = first_not_finite(values)) return refused;
  const auto rows = columns == 0 ? 0 : std::ssize(values) / columns;
  const auto per_row = ceil_div(columns, block);
  require(std::ssize(scales) == ceil_div(rows, block) * per_row, ErrorKind::kBug,
          "scales of {} blocks of a tensor [{}, {}]", scales.size(), rows, columns);
  std::ranges::fill(scales, 0.0F);
  const auto each_run = [&](const auto& visit) {
    for_each_run(
        rows, columns, {.rows = block, .columns = block},
        [&](std::size_t at, std::size_t count, std::size_t b) { visit(at, count, scales[b]); });
  };
  each_run([&](std::size_t at, std::size_t count, float& largest) {
    for (const float value : values.subspan(at, count))
      largest = std::max(largest, std::abs(value));
  });
  for (auto& scale : scales) {
    scale /= kE4M3Max;
    if (scale == 0.0F) {
      scale = 1.0F;
    } else if (how == E4M3Scale::kPowerOfTwo) {
      scale = power_of_two_from(scale);
    }
  }
  std::optional<std::int64_t> rounded;
  each_run([&](std::size_t at, std::size_t count, float scale) {
    for (std::size_t i = at; i < at + count; ++i)
      into[i] = static_cast<std::byte>(to_e4m3(values[i] / scale));
    if (how == E4M3Scale::kLargest || rounded) return;
    for (std::size_t i = at; i < at + count && !rounded; ++i) {
      if (!is_e4m3(values[i] / scale)) rounded = static_cast<std::int64_t>(i);
    }
  });
  return rounded;
}

void requantize_e4m3(std::span<const float> values,
                     std::int64_t columns,
                     const BlockSize& block,
                     DType scale_dtype,
                     std::span<float> scales,
                     std::span<std::byte> into) {
  const auto rows = columns == 0 ? 0 : std::ssize(values) / columns;
  std::vector<float> largest(scales.size());
  for_each_run(rows, columns, block, [&](std::size_t at, std::size_t count, std::size_t b) {
    for (const float value : values.subspan(at, count))
      largest[b] = std::max(largest[b], std::abs(value));
  });
  for (std::size_t b = 0; b < scales.size(); ++b) {
    if (largest[b] / scales[b] > kE4M3Bound)
      scales[b] = wider_scale(largest[b], scales[b], scale_dtype);
  }
  for_each_run(rows, columns, block, [&](std::size_t at, std::size_t count, std::size_t b) {
    const float divisor = largest[b] == 0 ? 1.0F : scales[b];
    for (std::size_t i = at; i < at + count; ++i)
      into[i] = static_cast<std::byte>(to_e4m3(values[i] / divisor));
  });
}

std::optional<std::int64_t> quantize_e2m1(std::span<const float> values,
                                          std::span<std::byte> into,
                                          std::span<std::byte> exponents) {
  if (const auto refused = first_not_finite(values)) return refused;
  constexpr auto kBlock = static_cast<std::size_t>(kE2M1Block);
  require(values.size() % kBlock == 0 && exponents.size() == values.size() / kBlock &&
              into.size() == values.size() / 2,
          ErrorKind::kBug, "{} elements in {} blocks", values.size(), exponents.size());
  for (std::size_t b = 0; b < exponents.size(); ++b) {
    const auto block = values.subspan(b * kBlock, kBlock);
    float largest = 0;
    for (const float value : block) largest = std::max(largest, std::abs(value));
    const float unrounded = largest / kE2M1Max;
    const int exponent = largest == 0     ? 0
                         : unrounded == 0 ? -kScaleBias
                                          : std::max(ceil_exponent(unrounded), -kScaleBias);
    exponents[b] = static_cast<std::byte>(exponent + kScaleBias);
    const float factor = std::ldexp(1.0F, -exponent);
    for (std::size_t i = 0; i < kBlock; i += 2) {
      const auto low = to_e2m1(block[i] * factor);
      const auto high = to_e2m1(block[i + 1] * factor);
      into[(b * kBlock + i) / 2] = static_cast<std::byte>(low | high << 4U);
    }
  }
  return std::nullopt;
}

}  // namespace ferry::distckpt
