#include "distckpt/elements/dequantize.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "distckpt/elements/cast.h"

namespace ferry::distckpt {
namespace {

constexpr int kExponentBias = 127;
constexpr std::array<double, 16> kE2M1Values{0.0,  0.5,  1.0,  1.5,  2.0,  3.0,  4.0,  6.0,
                                             -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0};
constexpr std::array<double, 16> kInt4Values{-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0,
                                             0.0,  1.0,  2.0,  3.0,  4.0,  5.0,  6.0,  7.0};

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

double power_of_two(int exponent) {
  constexpr int kBias = std::numeric_limits<double>::max_exponent - 1;
  constexpr int kMantissa = std::numeric_limits<double>::digits - 1;
  return std::bit_cast<double>(static_cast<std::uint64_t>(exponent + kBias) << kMantissa);
}

// Elements [first, first + count) of a row of packs, times their factor.
void scale_run(Encoding encoding,
               const std::byte* __restrict row,
               std::int64_t first,
               std::int64_t count,
               double scale,
               float* __restrict out) {
  if (encoding == Encoding::kE4M3) {
    const auto factor = static_cast<float>(scale);
    const auto* in = row + first;
    for (std::int64_t i = 0; i < count; ++i)
      out[i] = to_float(std::to_integer<std::uint32_t>(in[i])) * factor;
    return;
  }
  const auto& values = encoding == Encoding::kE2M1 ? kE2M1Values : kInt4Values;
  std::array<float, 16> products{};
  for (std::size_t i = 0; i < products.size(); ++i)
    products[i] = static_cast<float>(values[i] * scale);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto at = first + i;
    const auto pack = std::to_integer<std::uint32_t>(row[at / 2]);
    out[i] = products[pack >> (at % 2 * 4) & 0xFU];
  }
}

// Elements of E2M1, two in a byte, by factors that are few: for each byte that occurs as an
// exponent the pairs of elements that a byte of them stands for, rounded to the dtype.
class PairTables {
 public:
  explicit PairTables(DType into) : into_(into), size_(static_cast<std::size_t>(size_of(into))) {}

  // The 256 pairs for this exponent. Null: an element of them overflows.
  const std::byte* of(std::byte exponent, double scale) {
    auto& table = tables_[std::to_integer<std::size_t>(exponent)];
    if (!table.known) table = make(scale);
    return table.pairs.empty() ? nullptr : table.pairs.data();
  }

 private:
  struct Table {
    bool known = false;
    std::vector<std::byte> pairs{};
  };

  Table make(double scale) const {
    std::array<float, 16> products{};
    for (std::size_t i = 0; i < products.size(); ++i)
      products[i] = static_cast<float>(kE2M1Values[i] * scale);
    std::vector<std::byte> values(products.size() * size_);
    const auto refused =
        cast(DType::kF32, std::as_bytes(std::span(products)), into_, values, CastRule::kRound);
    Table table{.known = true};
    if (refused) return table;
    for (std::size_t pair = 0; pair < 256; ++pair) {
      for (const auto element : {pair & 0xFU, pair >> 4U}) {
        const auto* value = values.data() + element * size_;
        table.pairs.insert(table.pairs.end(), value, value + size_);
      }
    }
    return table;
  }

  DType into_;
  std::size_t size_;
  std::array<Table, 256> tables_{};
};

template <std::size_t kPairBytes>
void look_up(const std::byte* __restrict packs,
             std::int64_t count,
             const std::byte* __restrict pairs,
             std::byte* __restrict into) {
  for (std::int64_t i = 0; i < count; ++i)
    std::memcpy(into + i * static_cast<std::int64_t>(kPairBytes),
                pairs + std::to_integer<std::size_t>(packs[i]) * kPairBytes, kPairBytes);
}

// 2^128, which an exponent may mean, is no float.
std::vector<double> block_values(const BlockScales& scales) {
  std::vector<double> values(static_cast<std::size_t>(scales.box.volume()));
  if (scales.dtype == DType::kU8 || scales.dtype == DType::kF8E8M0) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto exponent = std::to_integer<int>(scales.packed[i]);
      // torch's float8_e8m0fnu has a NaN; MXFP4's exponents are integers, as transformers reads
      // them.
      const bool nan = exponent == 0xFF && scales.dtype == DType::kF8E8M0;
      values[i] =
          nan ? std::numeric_limits<double>::quiet_NaN() : power_of_two(exponent - kExponentBias);
    }
    return values;
  }
  if (scales.dtype == DType::kF8E4M3) {
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = to_float(std::to_integer<std::uint32_t>(scales.packed[i]));
    return values;
  }
  const auto refused = cast(scales.dtype, scales.packed, DType::kF64,
                            std::as_writable_bytes(std::span(values)), CastRule::kExact);
  require(!refused, ErrorKind::kBug, "a scale cannot be read");
  return values;
}

std::vector<double> scale_values(const BlockScales& scales) {
  auto values = block_values(scales);
  if (scales.how == GlobalScale::kNone) return values;
  for (auto& value : values) {
    const auto of_block = static_cast<float>(value);
    value =
        scales.how == GlobalScale::kFactor ? of_block * scales.global : of_block / scales.global;
  }
  return values;
}

// A row of MXFP4, block by block. False: an element overflows, and it was not written whole.
bool look_up_row(std::int64_t first,
                 std::int64_t columns,
                 std::int64_t block,
                 std::span<const std::byte> packs,
                 const std::byte* exponents,
                 const double* factors,
                 PairTables& tables,
                 DType into_dtype,
                 std::byte* into) {
  const auto pair_bytes = 2 * size_of(into_dtype);
  const auto first_block = first / block;
  for (std::int64_t c = 0; c < columns;) {
    const auto index = (first + c) / block;
    const auto end = std::min(columns, (index + 1) * block - first);
    const auto* pairs = tables.of(exponents[index - first_block], factors[index - first_block]);
    if (pairs == nullptr) return false;
    const auto* from = packs.data() + c / 2;
    auto* const to = into + c / 2 * pair_bytes;
    if (pair_bytes == 4) {
      look_up<4>(from, (end - c) / 2, pairs, to);
    } else {
      look_up<8>(from, (end - c) / 2, pairs, to);
    }
    c = end;
  }
  return true;
}

}  // namespace

std::int64_t pack_size(Encoding encoding) {
  switch (encoding) {
    case Encoding::kE4M3:
      return 1;
    case Encoding::kE2M1:
      return 2;
    case Encoding::kInt4:
      return 8;
  }
  return 1;
}

bool holds(DType stored, Encoding encoding) {
  switch (encoding) {
    case Encoding::kE4M3:
      return stored == DType::kF8E4M3;
    case Encoding::kE2M1:
      return stored == DType::kU8;
    case Encoding::kInt4:
      return stored == DType::kI32;
  }
  return false;
}

bool is_scale(DType dtype) {
  return dtype == DType::kU8 || dtype == DType::kF8E8M0 || dtype == DType::kF8E4M3 ||
         can_cast(dtype, DType::kF32);
}

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
                                       Encoding encoding,
                                       std::span<const std::byte> from,
                                       const BlockScales& scales,
                                       DType into_dtype,
                                       std::span<std::byte> into) {
  const int last = box.rank() - 1;
  const auto pack = pack_size(encoding);
  require(last >= 0 && box.offset[last] % pack == 0 && box.size[last] % pack == 0, ErrorKind::kBug,
          "elements in a box {} cannot be dequantised", to_string(box));
  const auto columns = box.size[last];
  const auto values = scale_values(scales);
  const auto strides = row_major_strides(scales.box.size);
  const auto block = scales.block[last];
  std::vector<float> row(static_cast<std::size_t>(columns));
  const auto row_bytes = static_cast<std::size_t>(columns * size_of(into_dtype));
  const auto rows = columns == 0 ? 0 : box.volume() / columns;
  const auto packed_bytes = encoding == Encoding::kE4M3 ? columns : columns / 2;
  const bool by_tables = encoding == Encoding::kE2M1 && scales.how == GlobalScale::kNone &&
                         (scales.dtype == DType::kU8 || scales.dtype == DType::kF8E8M0) &&
                         block % 2 == 0 && size_of(into_dtype) <= 4;
  std::optional<PairTables> tables;
  if (by_tables) tables.emplace(into_dtype);
  Dims at = box.offset;
  for (std::int64_t r = 0; r < rows; ++r) {
    std::int64_t first_scale = 0;
    for (int d = 0; d < last; ++d)
      first_scale += (at[d] / scales.block[d] - scales.box.offset[d]) * strides[d];
    const auto* const of_row = values.data() + first_scale;
    const auto* const in = from.data() + r * packed_bytes;
    const auto next = [&] {
      for (int d = last - 1; d >= 0 && ++at[d] == box.end(d); --d) at[d] = box.offset[d];
    };
    if (tables && look_up_row(box.offset[last], columns, block,
                              from.subspan(static_cast<std::size_t>(r * packed_bytes)),
                              scales.packed.data() + first_scale, of_row, *tables, into_dtype,
                              into.data() + static_cast<std::size_t>(r) * row_bytes)) {
      next();
      continue;
    }
    for (std::int64_t c = 0; c < columns;) {
      const auto block_column = (box.offset[last] + c) / block;
      const auto end = std::min(columns, (block_column + 1) * block - box.offset[last]);
      const auto factor = of_row[block_column - scales.box.offset[last]];
      scale_run(encoding, in, c, end - c, factor, row.data() + c);
      c = end;
    }
    const auto overflow =
        cast(DType::kF32, std::as_bytes(std::span(row)), into_dtype,
             into.subspan(static_cast<std::size_t>(r) * row_bytes, row_bytes), CastRule::kRound);
    if (overflow) return r * columns + *overflow;
    next();
  }
  return std::nullopt;
}

}  // namespace ferry::distckpt
