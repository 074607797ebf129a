#include "models/kernels/product/host_product.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>

#include "distckpt/base/integers.h"
#include "models/kernels/product/host_chains.h"

namespace ferry::models {
namespace {

using host::Half;
using host::kColumns;
using host::kLongestBlock;
using host::kTileRows;
using host::Panel;

struct HostProduct {
  const Half* x = nullptr;       // [rows, k]
  const Half* weight = nullptr;  // [n, k]
  const Half* bias = nullptr;    // [n], or null
  Half* y = nullptr;             // [rows, n]
  std::int64_t rows = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  std::int64_t block = 0;  // of k
};

// The columns of one panel.
FERRY_AVX512_BF16 void multiply_panel(const HostProduct& product, std::int64_t column) {
  alignas(64) thread_local Panel panel;
  __m512 sums[kMostHostProductRows];
  const auto columns = std::min(kColumns, product.n - column);
  for (std::int64_t begin = 0; begin < product.k; begin += product.block) {
    const auto count = std::min(product.block, product.k - begin);
    const auto* const weight = product.weight + column * product.k + begin;
    const auto* const next =
        column + 2 * kColumns <= product.n ? weight + kColumns * product.k : nullptr;
    if (product.rows <= host::kMostUnpackedRows) {
      host::kMultiplyUnpacked[product.rows - 1](product.x + begin, product.k, weight, columns,
                                                count, next, begin == 0, sums);
      continue;
    }
    host::pack(weight, product.k, columns, count, panel);
    for (std::int64_t row = 0; row < product.rows; row += kTileRows) {
      const auto tile = std::min(kTileRows, product.rows - row);
      host::kMultiply[tile - 1](product.x + row * product.k + begin, product.k, panel, count / 2,
                                row == 0 ? next : nullptr, begin == 0, sums + row);
    }
  }
  const auto mask = static_cast<__mmask16>((1U << static_cast<unsigned>(columns)) - 1U);
  auto bias = _mm512_setzero_ps();
  if (product.bias != nullptr) {
    const auto bits = _mm256_maskz_loadu_epi16(mask, product.bias + column);
    bias = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  for (std::int64_t row = 0; row < product.rows; ++row) {
    const auto sum = product.bias == nullptr ? sums[row] : _mm512_add_ps(sums[row], bias);
    _mm256_mask_storeu_epi16(product.y + row * product.n + column, mask,
                             (__m256i)_mm512_cvtneps_pbh(sum));
  }
}

const Half* bits_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<const Half*>(tensor.const_data_ptr()) : nullptr;
}

at::Tensor multiply_all(const at::Tensor& x,
                        const at::Tensor& weight,
                        const at::Tensor& bias,
                        std::int64_t block) {
  auto y = at::empty({x.size(0), weight.size(0)}, x.options());
  const HostProduct product{.x = bits_of(x),
                            .weight = bits_of(weight),
                            .bias = bits_of(bias),
                            .y = static_cast<Half*>(y.mutable_data_ptr()),
                            .rows = x.size(0),
                            .n = weight.size(0),
                            .k = weight.size(1),
                            .block = block};
  const auto panels = distckpt::ceil_div(product.n, kColumns);
  at::parallel_for(0, panels, 4, [&](std::int64_t begin, std::int64_t end) {
    for (auto panel = begin; panel < end; ++panel) multiply_panel(product, panel * kColumns);
  });
  return y;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return at::equal(a.view(at::kShort), b.view(at::kShort));
}

// Rows whose products with the rows of a weight are zero but for roundings.
struct Cancelling {
  at::Tensor x{}, weight{};
};
Cancelling cancelling(std::int64_t n, std::int64_t k, const at::TensorOptions& options) {
  const auto half = k / 2;
  // Multiples of numbers without pattern, the same at every call.
  const auto noise = [&](std::int64_t rows, double step) {
    const auto index = at::arange(rows * half, at::kDouble).view({rows, half});
    return (index * step).sin().to(options);
  };
  const auto x = noise(16, 12.9898);
  const auto weight = noise(n, 78.233);
  return {
      .x = at::cat({x, x, at::zeros({16, k - 2 * half}, options)}, 1).contiguous(),
      .weight = at::cat({weight, -weight, at::zeros({n, k - 2 * half}, options)}, 1).contiguous()};
}

// The blocks of K that at::linear adds up for a shape, measured once; nothing if it is none of
// these.
class Blocks {
 public:
  static Blocks& of_process() {
    static Blocks blocks;
    return blocks;
  }

  std::optional<std::int64_t> find(const at::Tensor& weight, const at::Tensor& bias) {
    const std::tuple key{weight.size(0), weight.size(1), bias.defined(), at::get_num_threads()};
    const std::lock_guard lock(mutex_);
    if (const auto found = known_.find(key); found != known_.end()) return found->second;
    return known_.emplace(key, measure(weight, bias)).first->second;
  }

 private:
  static std::optional<std::int64_t> measure(const at::Tensor& weight, const at::Tensor& bias) {
    constexpr std::int64_t kMostColumns = 4096;
    const auto k = weight.size(1);
    const auto [x, zeros] = cancelling(std::min(weight.size(0), kMostColumns), k, weight.options());
    const auto expected = at::linear(x, zeros);
    const auto added = bias.defined() ? std::optional(bias) : std::nullopt;
    for (const std::int64_t block : {kLongestBlock, kLongestBlock / 2}) {
      if (same_bits(multiply_all(x, zeros, {}, block), expected) &&
          same_bits(multiply_all(x, weight, bias, block), at::linear(x, weight, added)))
        return block;
    }
    return std::nullopt;
  }

  std::mutex mutex_;
  std::map<std::tuple<std::int64_t, std::int64_t, bool, int>, std::optional<std::int64_t>> known_;
};

}  // namespace

at::Tensor host_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const bool fits = host::has_avx512_bf16() && x.device().is_cpu() && x.dim() == 2 &&
                    x.scalar_type() == at::kBFloat16 && weight.scalar_type() == at::kBFloat16 &&
                    weight.is_contiguous() && x.size(0) > 0 && x.size(0) <= kMostHostProductRows &&
                    x.size(1) % 2 == 0 && (!bias.defined() || bias.scalar_type() == at::kBFloat16);
  if (!fits) return {};
  const auto own_bias = bias.defined() ? bias.contiguous() : bias;
  const auto block = Blocks::of_process().find(weight, own_bias);
  if (!block) return {};
  return multiply_all(x.contiguous(), weight, own_bias, *block);
}

}  // namespace ferry::models
