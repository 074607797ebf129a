#include "distckpt/dequantize.h"

#include <algorithm>
#include <array>
#include <bit>
#include <vector>

#include "distckpt/cast.h"
#include "distckpt/error.h"

namespace ferry::distckpt {
namespace {

// The 256 values of torch.float8_e4m3fn: no infinities, one NaN of each sign.
const std::array<float, 256>& values() {
  static const auto table = [] {
    std::array<float, 256> all{};
    for (unsigned i = 0; i < all.size(); ++i) {
      const std::byte element{static_cast<std::uint8_t>(i)};
      all[i] = static_cast<float>(element_value(DType::kF8E4M3, &element));
    }
    // c10's conversion gives NaN these bits.
    all[0x7F] = std::bit_cast<float>(0x7FF00000U);
    all[0xFF] = std::bit_cast<float>(0xFFF00000U);
    return all;
  }();
  return table;
}

}  // namespace

bool can_dequantize(DType from) {
  return from == DType::kF8E4M3;
}

Box scales_of(const Box& box, const Dims& block) {
  Box scales = box;
  for (int d = 0; d < box.rank(); ++d) {
    scales.offset[d] = box.offset[d] / block[d];
    scales.size[d] = (box.end(d) + block[d] - 1) / block[d] - scales.offset[d];
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
  const auto& table = values();
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
      for (; c < end; ++c)
        row[static_cast<std::size_t>(c)] = table[std::to_integer<std::uint8_t>(in[c])] * factor;
    }
    const auto overflow =
        cast(DType::kF32, std::as_bytes(std::span(row)), into_dtype,
             into.subspan(static_cast<std::size_t>(r) * row_bytes, row_bytes), CastRule::kRound);
    if (overflow) return r * columns + *overflow;
  }
  return std::nullopt;
}

}  // namespace ferry::distckpt
