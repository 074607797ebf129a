#include "distckpt/elements/dequantize.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "distckpt/elements/cast.h"

namespace ferry::distckpt {
namespace {

// torch.float8_e4m3fn: sign, four bits of exponent with bias 7, three of mantissa; no infinities,
// one NaN of each sign, to which c10's conversion gives these bits. Written without branches,
// tables and subnormal floats, so that a compiler makes vectors of it.
float to_float(std::uint32_t element) {
  const auto sign = (element & 0x80U) << 24U;
  const auto magnitude = element & 0x7FU;
  const auto normal = (magnitude << 20U) + (120U << 23U);
  // (1 + m/8) * 2^-6 - 2^-6 = m * 2^-9
  const auto one_more = std::bit_cast<float>((magnitude << 20U) | (121U << 23U));
  const auto subnormal = std::bit_cast<std::uint32_t>(one_more - 0x1p-6F);
  const auto finite = magnitude < 8U ? subnormal : normal;
  return std::bit_cast<float>((magnitude == 0x7FU ? 0x7FF00000U : finite) | sign);
}

void scale_run(const std::byte* __restrict in,
               float factor,
               std::int64_t count,
               float* __restrict out) {
  for (std::int64_t i = 0; i < count; ++i)
    out[i] = to_float(std::to_integer<std::uint32_t>(in[i])) * factor;
}

}  // namespace

bool can_dequantize(DType from) {
  return from == DType::kF8E4M3;
}

Box scales_of(const Box& box, const Dims& block) {
  Box scales = box;
  for (int d = 0; d < box.rank(); ++d) {
    scales.offset[d] = box.offset[d] / block[d];
    scales.size[d] = ceil_div(box.end(d), block[d]) - scales.offset[d];
  }
  return scales;
}

std::optional<std::int64_t> dequantize(const Box& box,
                                       DType from_dtype,
                                       std::span<const std::byte> from,
                                       const BlockScales& scales,
                                       DType into_dtype,
                                       std::span<std::byte> into) {
  require(can_dequantize(from_dtype) && box.rank() == 2, ErrorKind::kBug,
          "elements of {} in a box {} cannot be dequantised", short_name(from_dtype),
          to_string(box));
  const auto rows = box.size[0];
  const auto columns = box.size[1];
  std::vector<float> scale(static_cast<std::size_t>(scales.box.volume()));
  const auto refused = cast(scales.dtype, scales.packed, DType::kF32,
                            std::as_writable_bytes(std::span(scale)), CastRule::kExact);
  require(!refused, ErrorKind::kBug, "a scale cannot be read");
  std::vector<float> row(static_cast<std::size_t>(columns));
  const auto row_bytes = static_cast<std::size_t>(columns * size_of(into_dtype));
  for (std::int64_t r = 0; r < rows; ++r) {
    const auto block_row = (box.offset[0] + r) / scales.block[0] - scales.box.offset[0];
    const auto* const of_row = scale.data() + block_row * scales.box.size[1];
    const auto* const in = from.data() + r * columns;
    for (std::int64_t c = 0; c < columns;) {
      const auto block_column = (box.offset[1] + c) / scales.block[1];
      const auto end = std::min(columns, (block_column + 1) * scales.block[1] - box.offset[1]);
      const float factor = of_row[block_column - scales.box.offset[1]];
      scale_run(in + c, factor, end - c, row.data() + c);
      c = end;
    }
    const auto overflow =
        cast(DType::kF32, std::as_bytes(std::span(row)), into_dtype,
             into.subspan(static_cast<std::size_t>(r) * row_bytes, row_bytes), CastRule::kRound);
    if (overflow) return r * columns + *overflow;
  }
  return std::nullopt;
}

}  // namespace ferry::distckpt
