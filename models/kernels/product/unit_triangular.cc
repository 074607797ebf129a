#include "models/kernels/product/unit_triangular.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linalg_solve_triangular.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "distckpt/base/error.h"
#include "models/kernels/product/float_chains.h"
#include "models/kernels/product/float_product.h"

namespace ferry::models {
namespace {

constexpr std::int64_t kBlockOfAvx512 = 48;
constexpr std::int64_t kMultiplyAddsOfAThread = 1 << 18;  // fewer take less time than to wake one

at::Tensor solution_of_libtorch(const at::Tensor& system, const at::Tensor& right) {
  return at::linalg_solve_triangular(system, right, /*upper=*/false, /*left=*/true,
                                     /*unitriangular=*/true);
}

// `transposed`: of the upper triangle that the transposed system is.
at::Tensor solve_in_order(const at::Tensor& system,
                          const at::Tensor& right,
                          bool transposed,
                          TriangleOrder order) {
  require(
      host::has_avx2_and_fma(), ErrorKind::kDevice,
      "this processor has no AVX2 and FMA, which systems in fp32 are solved by in bitwise mode");
  const auto n = system.size(-1);
  const auto columns = right.size(-1);
  require(system.size(-2) == n && right.size(-2) == n && n <= host::kLongestChain &&
              system.numel() / std::max<std::int64_t>(1, n * n) * n * columns == right.numel() &&
              is_host_float(right),
          ErrorKind::kBug, "systems of {} numbers, {} rows each, and {} numbers on their right",
          system.numel(), n, right.numel());
  const auto own = system.contiguous();
  auto solution = right.clone(at::MemoryFormat::Contiguous);
  if (solution.numel() == 0) return solution;
  const auto* const l = own.const_data_ptr<float>();
  auto* const x = solution.mutable_data_ptr<float>();
  const auto solve = [&](std::int64_t i) {
    host::UnitTriangle triangle{.l = l + i * n * n,
                                .l_row = n,
                                .l_column = 1,
                                .x = x + i * n * columns,
                                .x_row = columns,
                                .rows = n,
                                .columns = columns,
                                .block = order == TriangleOrder::kBlocks ? kBlockOfAvx512 : n,
                                .in_lanes = order == TriangleOrder::kLanes};
    if (transposed) {  // from the last row to the first one, it is a lower triangle
      triangle.l += n * n - 1;
      triangle.l_row = -1;
      triangle.l_column = -n;
      triangle.x += (n - 1) * columns;
      triangle.x_row = -columns;
    }
    host::solve_triangle(triangle);
  };
  const auto together = std::max<std::int64_t>(
      1, kMultiplyAddsOfAThread / std::max<std::int64_t>(1, n * n * columns));
  at::parallel_for(0, own.numel() / (n * n), together, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = begin; i < end; ++i) solve(i);
  });
  return solution;
}

class TriangularSolution : public torch::autograd::Function<TriangularSolution> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& system,
                            const at::Tensor& right) {
    auto solution = solve_in_order(system, right, false, triangle_order());
    context->save_for_backward({system, solution});
    return solution;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const auto of_right = solve_in_order(saved[0], grads[0], true, triangle_order());
    at::Tensor of_system;
    if (context->needs_input_grad(0))
      of_system =
          -matmul(of_right, saved[1].transpose(-1, -2), Alignment::kBitwise).tril(/*diagonal=*/-1);
    return {of_system, of_right};
  }
};

TriangleOrder measured_order() {
  constexpr std::int64_t kRows = 64;
  constexpr std::int64_t kColumns = 8;
  const at::NoGradGuard no_grad;
  const auto system = at::empty({1, kRows, kRows}, at::kFloat);
  const auto right = at::empty({1, kRows, kColumns}, at::kFloat);
  std::uint32_t state = 1;  // of a linear congruential generator: no other numbers are disturbed
  const auto fill = [&](const at::Tensor& x) {
    auto* const data = x.mutable_data_ptr<float>();
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      state = state * 1664525U + 1013904223U;
      data[i] = static_cast<float>(state >> 8) / static_cast<float>(1U << 26) - 0.125F;
    }
  };
  fill(system);
  fill(right);
  const auto theirs = solution_of_libtorch(system, right);
  for (const auto order : {TriangleOrder::kBlocks, TriangleOrder::kLanes}) {
    if (at::equal(theirs, solve_in_order(system, right, false, order))) return order;
  }
  return TriangleOrder::kRows;
}

}  // namespace

std::string_view name_of(TriangleOrder order) {
  switch (order) {
    case TriangleOrder::kRows:
      return "row by row";
    case TriangleOrder::kBlocks:
      return "blocks of 48 rows";
    case TriangleOrder::kLanes:
      return "in four lanes";
  }
  return "";
}

TriangleOrder triangle_order() {
  static const auto order = measured_order();
  return order;
}

at::Tensor solve_unit_triangular(const at::Tensor& system,
                                 const at::Tensor& right,
                                 Alignment alignment) {
  if (alignment == Alignment::kFast || !is_host_float(right))
    return solution_of_libtorch(system, right);
  return TriangularSolution::apply(system, right);
}

}  // namespace ferry::models
