#include "converter/adapter/loops/truncated_svd.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <numeric>
#include <thread>
#include <utility>

#include "distckpt/base/integers.h"

namespace ferry::converter {
namespace {

constexpr std::int64_t kOversampling = 10;  // columns beyond the rank, as Halko et al. advise
constexpr int kMaxIterations = 12;
constexpr double kGain =
    1e-4;  // of the squared error: an iteration that takes off less is the last
constexpr double kExact = 1e-13;  // a squared error that is rounding alone, of the squared norm
constexpr std::int64_t kBlock = 256;

// Calls `body` with parts of [0, count), by several threads at a time. The parts begin at multiples
// of kBlock.
void in_parallel(std::int64_t count,
                 int threads,
                 const std::function<void(std::int64_t, std::int64_t)>& body) {
  const auto blocks = distckpt::ceil_div(count, kBlock);
  const auto parts = std::clamp<std::int64_t>(threads, 1, std::max<std::int64_t>(1, blocks));
  const auto begin_of = [&](std::int64_t part) {
    return std::min(count, blocks * part / parts * kBlock);
  };
  std::vector<std::jthread> others;
  for (std::int64_t part = 1; part < parts; ++part)
    others.emplace_back(
        [&body, begin = begin_of(part), end = begin_of(part + 1)] { body(begin, end); });
  body(begin_of(0), begin_of(1));
}

// A matrix of few columns, row-major.
struct Skinny {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::vector<double> values{};

  Skinny(std::int64_t rows_of, std::int64_t columns_of)
      : rows(rows_of),
        columns(columns_of),
        values(static_cast<std::size_t>(rows_of * columns_of)) {}
  double* row(std::int64_t at) { return values.data() + at * columns; }
  const double* row(std::int64_t at) const { return values.data() + at * columns; }
};

struct Matrix {
  const float* values = nullptr;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  int threads = 1;

  const float* row(std::int64_t at) const { return values + at * columns; }
};

// into[k] += sum over i < 4 of factors[i] * from[i * stride + k]
void add_four(
    const float* factors, std::int64_t step, const double* from, std::int64_t size, double* into) {
  const double f0 = factors[0];
  const double f1 = factors[step];
  const double f2 = factors[2 * step];
  const double f3 = factors[3 * step];
  for (std::int64_t k = 0; k < size; ++k)
    into[k] +=
        f0 * from[k] + f1 * from[size + k] + f2 * from[2 * size + k] + f3 * from[3 * size + k];
}

void add_one(double factor, const double* from, std::int64_t size, double* into) {
  for (std::int64_t k = 0; k < size; ++k) into[k] += factor * from[k];
}

// matrix x
Skinny product(const Matrix& matrix, const Skinny& x) {
  Skinny y(matrix.rows, x.columns);
  in_parallel(matrix.rows, matrix.threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t from = 0; from < matrix.columns; from += kBlock) {
      const auto to = std::min(from + kBlock, matrix.columns);
      for (auto i = begin; i < end; ++i) {
        auto j = from;
        for (; j + 4 <= to; j += 4) add_four(matrix.row(i) + j, 1, x.row(j), x.columns, y.row(i));
        for (; j < to; ++j)
          add_one(static_cast<double>(matrix.row(i)[j]), x.row(j), x.columns, y.row(i));
      }
    }
  });
  return y;
}

// The transposed matrix times y.
Skinny transposed_product(const Matrix& matrix, const Skinny& y) {
  Skinny z(matrix.columns, y.columns);
  in_parallel(matrix.columns, matrix.threads, [&](std::int64_t begin, std::int64_t end) {
    for (auto from = begin; from < end; from += kBlock) {
      const auto to = std::min(from + kBlock, end);
      std::int64_t i = 0;
      for (; i + 4 <= matrix.rows; i += 4) {
        for (auto j = from; j < to; ++j)
          add_four(matrix.row(i) + j, matrix.columns, y.row(i), y.columns, z.row(j));
      }
      for (; i < matrix.rows; ++i) {
        for (auto j = from; j < to; ++j)
          add_one(static_cast<double>(matrix.row(i)[j]), y.row(i), y.columns, z.row(j));
      }
    }
  });
  return z;
}

// Numbers between -1 and 1, always the same (splitmix64).
Skinny start_of(std::int64_t rows, std::int64_t columns) {
  Skinny x(rows, columns);
  std::uint64_t state = 0;
  for (auto& value : x.values) {
    state += 0x9E3779B97F4A7C15U;
    auto bits = state;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9U;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBU;
    bits ^= bits >> 31;
    value = static_cast<double>(bits >> 11) * 0x1p-52 - 1;
  }
  return x;
}

double dot(const double* a, const double* b, std::int64_t size) {
  // Four sums, so that additions need not wait for each other.
  double sums[4] = {};
  std::int64_t i = 0;
  for (; i + 4 <= size; i += 4) {
    for (int lane = 0; lane < 4; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  for (; i < size; ++i) sums[0] += a[i] * b[i];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Makes the columns orthonormal, by Gram and Schmidt's method carried out twice; a column that
// depends on those before it becomes zero. Returns the triangle r of x = q r, row-major.
std::vector<double> orthonormalize(Skinny& x) {
  const auto n = x.columns;
  std::vector<double> columns(x.values.size());  // one after the other
  for (std::int64_t i = 0; i < x.rows; ++i) {
    for (std::int64_t k = 0; k < n; ++k)
      columns[static_cast<std::size_t>(k * x.rows + i)] = x.row(i)[k];
  }
  const auto column = [&](std::int64_t k) { return columns.data() + k * x.rows; };
  std::vector<double> r(static_cast<std::size_t>(n * n));
  for (std::int64_t k = 0; k < n; ++k) {
    const auto before = dot(column(k), column(k), x.rows);
    for (int pass = 0; pass < 2; ++pass) {
      for (std::int64_t other = 0; other < k; ++other) {
        const auto part = dot(column(other), column(k), x.rows);
        r[static_cast<std::size_t>(other * n + k)] += part;
        add_one(-part, column(other), x.rows, column(k));
      }
    }
    const auto after = dot(column(k), column(k), x.rows);
    const bool dependent = after <= 1e-26 * before;
    const auto length = dependent ? 0 : std::sqrt(after);
    r[static_cast<std::size_t>(k * n + k)] = length;
    for (std::int64_t i = 0; i < x.rows; ++i) column(k)[i] = dependent ? 0 : column(k)[i] / length;
  }
  for (std::int64_t i = 0; i < x.rows; ++i) {
    for (std::int64_t k = 0; k < n; ++k)
      x.row(i)[k] = columns[static_cast<std::size_t>(k * x.rows + i)];
  }
  return r;
}

// u diag(s) v transposed; columns of u and v lie one after the other, the largest first.
struct SmallSvd {
  std::int64_t size = 0;
  std::vector<double> u{};
  std::vector<double> s{};
  std::vector<double> v{};
};

// One-sided rotations after Jacobi, of the columns of `u`, which the result takes over.
SmallSvd small_svd(std::vector<double> u, std::int64_t n) {
  SmallSvd svd{.size = n,
               .u = std::move(u),
               .s = std::vector<double>(static_cast<std::size_t>(n)),
               .v = std::vector<double>(static_cast<std::size_t>(n * n))};
  for (std::int64_t k = 0; k < n; ++k) svd.v[static_cast<std::size_t>(k * n + k)] = 1;
  const auto rotate = [&](double* a, double* b, double cosine, double sine) {
    for (std::int64_t i = 0; i < n; ++i) {
      const auto first = a[i];
      a[i] = cosine * first - sine * b[i];
      b[i] = sine * first + cosine * b[i];
    }
  };
  constexpr int kMaxSweeps = 60;
  bool turned = true;
  for (int sweep = 0; turned && sweep < kMaxSweeps; ++sweep) {
    turned = false;
    for (std::int64_t p = 0; p < n; ++p) {
      for (auto q = p + 1; q < n; ++q) {
        auto* const a = svd.u.data() + p * n;
        auto* const b = svd.u.data() + q * n;
        const auto aa = dot(a, a, n);
        const auto bb = dot(b, b, n);
        const auto ab = dot(a, b, n);
        if (std::abs(ab) <= 1e-15 * std::sqrt(aa * bb)) continue;
        turned = true;
        const auto zeta = (bb - aa) / (2 * ab);
        const auto tangent = std::copysign(1 / (std::abs(zeta) + std::hypot(1, zeta)), zeta);
        const auto cosine = 1 / std::hypot(1, tangent);
        rotate(a, b, cosine, cosine * tangent);
        rotate(svd.v.data() + p * n, svd.v.data() + q * n, cosine, cosine * tangent);
      }
    }
  }
  std::vector<std::pair<double, std::int64_t>> order;
  for (std::int64_t k = 0; k < n; ++k) {
    const auto* const a = svd.u.data() + k * n;
    order.emplace_back(-std::sqrt(dot(a, a, n)), k);
  }
  std::ranges::sort(order);
  SmallSvd sorted = svd;
  for (std::int64_t k = 0; k < n; ++k) {
    const auto [length, from] = order[static_cast<std::size_t>(k)];
    sorted.s[static_cast<std::size_t>(k)] = -length;
    for (std::int64_t i = 0; i < n; ++i) {
      const auto at = static_cast<std::size_t>(k * n + i);
      sorted.u[at] = length == 0 ? 0 : svd.u[static_cast<std::size_t>(from * n + i)] / -length;
      sorted.v[at] = svd.v[static_cast<std::size_t>(from * n + i)];
    }
  }
  return sorted;
}

// The first columns of basis * (small, whose columns lie one after the other), times the roots.
Skinny rotated(const Skinny& basis,
               const std::vector<double>& small,
               const SmallSvd& svd,
               std::int64_t rank) {
  Skinny result(basis.rows, rank);
  for (std::int64_t i = 0; i < basis.rows; ++i) {
    for (std::int64_t k = 0; k < rank; ++k) {
      result.row(i)[k] = std::sqrt(svd.s[static_cast<std::size_t>(k)]) *
                         dot(basis.row(i), small.data() + k * svd.size, svd.size);
    }
  }
  return result;
}

// The squared norm of each row of matrix - left right, added up.
double norm_left_over(const Matrix& matrix,
                      std::span<const float> left,
                      std::span<const float> right,
                      std::int64_t rank) {
  std::vector<double> sums(static_cast<std::size_t>(matrix.rows));
  in_parallel(matrix.rows, matrix.threads, [&](std::int64_t begin, std::int64_t end) {
    std::vector<double> rest(static_cast<std::size_t>(matrix.columns));
    for (auto i = begin; i < end; ++i) {
      std::copy_n(matrix.row(i), matrix.columns, rest.begin());
      for (std::int64_t k = 0; k < rank; ++k) {
        const double factor = left[static_cast<std::size_t>(i * rank + k)];
        const float* const from = right.data() + k * matrix.columns;
        double* const into = rest.data();
        for (std::int64_t j = 0; j < matrix.columns; ++j)
          into[j] -= factor * static_cast<double>(from[j]);
      }
      sums[static_cast<std::size_t>(i)] = dot(rest.data(), rest.data(), matrix.columns);
    }
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

}  // namespace

TruncatedSvd truncated_svd(std::span<const float> values,
                           std::int64_t rows,
                           std::int64_t columns,
                           std::int64_t rank,
                           int threads) {
  const Matrix matrix{
      .values = values.data(), .rows = rows, .columns = columns, .threads = threads};
  TruncatedSvd result{.left = std::vector<float>(static_cast<std::size_t>(rows * rank)),
                      .right = std::vector<float>(static_cast<std::size_t>(rank * columns))};
  result.matrix_norm = norm_left_over(matrix, {}, {}, 0);
  if (result.matrix_norm == 0) return result;
  const auto smaller = std::min(rows, columns);
  const auto kept = std::min(rank, smaller);
  auto right = start_of(columns, std::min(kept + kOversampling, smaller));
  double error = result.matrix_norm;
  for (int iteration = 0;; ++iteration) {
    auto left = product(matrix, right);
    orthonormalize(left);
    right = transposed_product(matrix, left);
    const auto triangle = orthonormalize(right);
    // matrix = left (triangle transposed) (right transposed): rows of the triangle are columns of
    // its transposed.
    const auto small = small_svd(triangle, right.columns);
    auto found = result.matrix_norm;
    for (std::int64_t k = 0; k < kept; ++k)
      found -= small.s[static_cast<std::size_t>(k)] * small.s[static_cast<std::size_t>(k)];
    const bool last = found <= kExact * result.matrix_norm || error - found < kGain * found ||
                      iteration + 1 == kMaxIterations;
    error = found;
    if (!last) continue;
    const auto u = rotated(left, small.u, small, kept);
    const auto v = rotated(right, small.v, small, kept);
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t k = 0; k < kept; ++k)
        result.left[static_cast<std::size_t>(i * rank + k)] = static_cast<float>(u.row(i)[k]);
    }
    for (std::int64_t k = 0; k < kept; ++k) {
      for (std::int64_t j = 0; j < columns; ++j)
        result.right[static_cast<std::size_t>(k * columns + j)] = static_cast<float>(v.row(j)[k]);
    }
    result.error_norm = norm_left_over(matrix, result.left, result.right, rank);
    return result;
  }
}

}  // namespace ferry::converter
