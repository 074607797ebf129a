// The kernels of models/kernels on a GPU, byte for byte against the formulas and calls that Hugging
// Face makes. Skipped where there is no GPU.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "models/kernels/log_probs.h"
#include "models/kernels/product/gemm.h"
#include "models/kernels/product/linear.h"
#include "models/kernels/product/main_grad.h"
#include "models/kernels/rms_norm.h"
#include "models/kernels/rms_norm_cuda.h"
#include "models/kernels/rotary_cuda.h"
#include "models/kernels/split_qkv.h"
#include "models/kernels/swiglu_cuda.h"
#include "tests/models/cuda_fixture.h"

namespace ferry::models {
namespace cuda_kernels_test {

TEST_F(CudaKernels, RmsNormHasTheBytesOfHuggingFacesFormula) {
  for (const auto dtype : {at::kBFloat16, at::kFloat})
    for (const std::int64_t channels :
         {64, 96, 128, 512, 896, 1024, 1536, 2048, 3584, 4096, 5120, 7168, 8192, 16384}) {
      const auto x = random({300, channels}, dtype);
      const auto weight = random({channels}, dtype);
      const auto wide = x.to(at::kFloat);
      const auto variance = wide.pow(2).mean(-1, true);
      const auto expected = weight * (wide * at::rsqrt(variance + 1e-6)).to(dtype);
      EXPECT_TRUE(same_bytes(rms_norm_cuda(x, {}, weight, 1e-6).y, expected)) << channels;
      for (const std::int64_t rows : {1, 2, 7, 15, 16, 17})
        EXPECT_TRUE(same_bytes(rms_norm_cuda(x.narrow(0, 3, rows), {}, weight, 1e-6).y,
                               expected.narrow(0, 3, rows)))
            << channels << ", rows " << rows;
      const auto many = rms_norm_cuda(x.repeat({4, 1}), {}, weight, 1e-6).y;  // of another kernel
      EXPECT_TRUE(same_bytes(many, expected.repeat({4, 1}))) << channels;
    }
}

// Compares a norm of x [300, channels] that rounds once with ATen's; `factor` [channels], fp32, is
// what the weight stands for.
void expect_bytes_of_one_rounding(const at::Tensor& x,
                                  const at::Tensor& weight,
                                  const at::Tensor& factor,
                                  NormRounding rounding) {
  const auto channels = weight.size(0);
  const auto wide = x.to(at::kFloat);
  const auto variance = wide.pow(2).mean(-1, true);
  const auto expected = (wide * at::rsqrt(variance + 1e-6) * factor).to(at::kBFloat16);
  for (const std::int64_t rows : {1, 15, 300})
    EXPECT_TRUE(same_bytes(rms_norm_cuda(x.narrow(0, 0, rows), {}, weight, 1e-6, rounding).y,
                           expected.narrow(0, 0, rows)))
        << channels << ", rows " << rows;
  EXPECT_TRUE(same_bytes(rms_norm_cuda(x.repeat({4, 1}), {}, weight, 1e-6, rounding).y,
                         expected.repeat({4, 1})))
      << channels;
}

TEST_F(CudaKernels, RmsNormThatRoundsOnceHasTheBytesOfItsFormula) {
  for (const std::int64_t channels : {64, 2880, 8192}) {
    const auto weight = random({channels});
    expect_bytes_of_one_rounding(random({300, channels}), weight, weight.to(at::kFloat),
                                 NormRounding::kOnce);
  }
}

TEST_F(CudaKernels, RmsNormThatAddsOneToTheWeightHasTheBytesOfItsFormula) {
  for (const std::int64_t channels : {64, 256, 1152, 2560, 3840, 8192}) {
    const auto weight = random({channels});
    expect_bytes_of_one_rounding(random({300, channels}), weight, 1.0 + weight.to(at::kFloat),
                                 NormRounding::kOnceByOnePlus);
  }
}

// Compares gradients with those of y = (added + weight) * normed x in fp64, and with a second call.
void expect_near_gradients(const at::Tensor& x,
                           const at::Tensor& weight,
                           const at::Tensor& grad,
                           double added,
                           NormRounding rounding) {
  const auto root = rms_norm_cuda(x, {}, weight, 1e-6, rounding).inverse_rms;
  const auto [grad_x, grad_weight] = rms_norm_backward_cuda(grad, x, weight, root, {}, rounding);
  auto x64 = x.to(at::kDouble).requires_grad_();
  auto w64 = weight.to(at::kDouble).requires_grad_();
  const auto y64 = (added + w64) * (x64 * at::rsqrt(x64.pow(2).mean(-1, true) + 1e-6));
  y64.backward(grad.to(at::kDouble));
  const auto error = [](const at::Tensor& got, const at::Tensor& expected) {
    return ((got.to(at::kDouble) - expected).norm() / expected.norm()).item<double>();
  };
  EXPECT_LT(error(grad_x, x64.grad()), 6e-3);  // bf16 rounds by up to 2^-9, twice on the way
  EXPECT_LT(error(grad_weight, w64.grad()), 6e-3);
  const auto again = rms_norm_backward_cuda(grad, x, weight, root, {}, rounding);
  EXPECT_TRUE(same_bytes(again.first, grad_x));
  EXPECT_TRUE(same_bytes(again.second, grad_weight));
}

TEST_F(CudaKernels, RmsNormsGradientsAreNearAndTheSameEachTime) {
  expect_near_gradients(random({1000, 2048}), random({2048}), random({1000, 2048}), 0,
                        NormRounding::kBeforeWeight);
}

TEST_F(CudaKernels, GradientsOfANormThatAddsOneToTheWeightAreNearAndTheSameEachTime) {
  expect_near_gradients(random({1000, 2048}), random({2048}), random({1000, 2048}), 1,
                        NormRounding::kOnceByOnePlus);
}

// 64 heads of 65,625 tokens: more partial sums than the y of a grid counts.
TEST_F(CudaKernels, GradientsOfANormOverManyHeadsAreThoseOfTheirHalves) {
  constexpr std::int64_t kHalf = 2'100'000;
  const auto x = random({2 * kHalf, 64});
  const auto weight = random({64});
  const auto root = rms_norm_cuda(x, {}, weight, 1e-6).inverse_rms;
  const auto backward = [&](std::int64_t begin, std::int64_t rows) {
    const auto part = x.narrow(0, begin, rows);
    return rms_norm_backward_cuda(part, part, weight, root.narrow(0, begin, rows), {});
  };
  const auto [grad_x, grad_weight] = backward(0, 2 * kHalf);
  auto sum = at::zeros({64}, weight.options().dtype(at::kFloat));
  for (const auto begin : {std::int64_t{0}, kHalf}) {
    const auto half = backward(begin, kHalf);
    EXPECT_TRUE(same_bytes(grad_x.narrow(0, begin, kHalf), half.first)) << begin;
    sum += half.second;
  }
  EXPECT_TRUE(at::allclose(grad_weight.to(at::kFloat), sum, 0.01));
}

TEST_F(CudaKernels, AddingAndNormingInOnePassIsAddingThenNorming) {
  for (const auto dtype : {at::kBFloat16, at::kFloat})
    for (const std::int64_t channels : {64, 96, 1536, 8192}) {
      const auto leaf = [&](at::IntArrayRef shape) {
        return random(shape, dtype).requires_grad_();
      };
      const auto x = leaf({70, channels});
      const auto delta = leaf({70, channels});
      const auto weight = leaf({channels});
      const auto of_y = random({70, channels}, dtype);
      const auto of_sum = random({70, channels}, dtype);
      const auto grads = [&](const at::Tensor& y, const at::Tensor& sum) {
        for (const auto& one : {x, delta, weight}) one.mutable_grad() = at::Tensor();
        ((y * of_y).sum() + (sum * of_sum).sum()).backward();
        return std::vector<at::Tensor>{x.grad(), delta.grad(), weight.grad()};
      };
      ResidualStream stream{.sum = x, .pending = delta};
      const auto y = add_and_norm(stream, weight, 1e-6);
      const auto sum = x + delta;
      const auto expected = rms_norm(sum, weight, 1e-6);
      EXPECT_TRUE(same_bytes(stream.sum.detach(), sum.detach())) << channels;
      EXPECT_TRUE(same_bytes(y.detach(), expected.detach())) << channels;
      const auto got = grads(y, stream.sum);
      const auto wanted = grads(expected, sum);
      for (std::size_t i = 0; i < got.size(); ++i)
        EXPECT_TRUE(at::allclose(got[i], wanted[i], 2e-2, 2e-2)) << channels << ", " << i;
    }
}

at::Tensor rotate_half(const at::Tensor& x) {
  const auto half = x.size(-1) / 2;
  return at::cat({-x.narrow(-1, half, half), x.narrow(-1, 0, half)}, -1);
}

TEST_F(CudaKernels, RotaryHasTheBytesOfHuggingFacesFormulaAndOfItsGradient) {
  for (const auto dtype : {at::kBFloat16, at::kFloat})
    for (const bool interleaved : {false, true}) {
      const std::int64_t tokens = 130, heads = 6, dim = 64;
      auto x = random({tokens, heads + 2, dim + 8}, dtype)
                   .narrow(1, 1, heads)
                   .narrow(2, 8, dim)
                   .detach()
                   .requires_grad_();
      const auto angles = random({tokens, 1, dim / 2}, at::kFloat) * 100;
      const auto both = at::cat({angles, angles}, -1);
      const auto cos = both.cos().to(dtype);
      const auto sin = both.sin().to(dtype);
      auto halves = x;
      if (interleaved)
        halves = x.view({tokens, heads, dim / 2, 2}).transpose(2, 3).reshape({tokens, heads, dim});
      const auto expected = halves * cos + rotate_half(halves) * sin;
      EXPECT_TRUE(same_bytes(rotary_cuda(x.detach(), cos, sin, interleaved), expected.detach()));
      const auto grad = random({tokens, heads, dim}, dtype);
      expected.backward(grad);
      auto got = at::empty_strided(x.sizes(), x.strides(), x.options());
      rotary_backward_cuda(grad, cos, sin, interleaved, got);
      EXPECT_TRUE(same_bytes(got, x.grad()));
    }
}

TEST_F(CudaKernels, SwigluHasTheBytesOfHuggingFacesFormula) {
  for (const auto dtype : {at::kBFloat16, at::kFloat}) {
    const auto gate_up = (random({300, 2 * 1408}, dtype) * 4).detach().requires_grad_();
    const auto expected = at::silu(gate_up.narrow(1, 0, 1408)) * gate_up.narrow(1, 1408, 1408);
    EXPECT_TRUE(same_bytes(swiglu_cuda(gate_up.detach()), expected.detach()));
    const auto grad = random({300, 1408}, dtype);
    expected.backward(grad);
    const auto got = swiglu_backward_cuda(grad, gate_up.detach());
    EXPECT_TRUE(at::allclose(got, gate_up.grad(), 1e-2, 1e-5));
    RecordProperty("gradient_elements_that_differ",
                   std::to_string(got.ne(gate_up.grad()).sum().item<std::int64_t>()));
  }
}

TEST_F(CudaKernels, ExpertsBiasesAndTheirActivationHaveTheBytesOfAtensOperations) {
  const auto ends = at::tensor({0, 7, 7, 50, 90}, at::kInt).cuda();
  const auto counts = at::tensor({0, 7, 0, 43, 50}, at::kLong).cuda();  // with rows behind the last
  for (const auto dtype : {at::kBFloat16, at::kFloat})
    for (const std::int64_t ffn : {64, 75}) {
      const auto gate_up = random({100, 2 * ffn}, dtype) * 5;
      const auto biases = random({5, 2 * ffn}, dtype);
      const auto sum = gate_up + biases.repeat_interleave(counts, 0);
      EXPECT_TRUE(same_bytes(add_expert_biases_cuda(gate_up, {biases, ends}), sum)) << ffn;
      const QuickGeglu options{.clamp = 7, .offset = 1};
      EXPECT_TRUE(
          same_bytes(quick_geglu_cuda(gate_up, {biases, ends}, options), quick_geglu(sum, options)))
          << ffn;
    }
}

TEST_F(CudaKernels, LogProbsHaveTheBytesOfLogSoftmaxWhereItsRowsDoNotDependOnTheirPlace) {
  const auto vocabulary_and_padding = {std::pair{128256, 0}, {151936, 0}, {32000, 64},
                                       {102400, 128},        {12292, 4},  {163840, 0},
                                       {129280, 0},          {50000, 3}};
  for (const auto& [vocabulary, padding] : vocabulary_and_padding) {
    const std::int64_t rows = 40;
    const auto logits = random({rows, vocabulary + padding}) * 8;
    const auto labels =
        at::randint(vocabulary, {rows}, at::TensorOptions(at::kLong).device(at::kCUDA));
    const VocabularyRange range{.first = 0, .count = vocabulary};
    for (const double temperature : {1.0, 0.7}) {
      const auto statistics = row_statistics(logits, labels, range, temperature);
      const auto wide = logits.narrow(1, 0, vocabulary).to(at::kFloat);
      const auto expected = at::log_softmax(temperature == 1 ? wide : wide / temperature, -1);
      EXPECT_TRUE(
          same_bytes(log_probs_of(statistics), expected.gather(1, labels.unsqueeze(1)).squeeze(1)))
          << vocabulary << ", temperature " << temperature;
      const auto exact = at::log_softmax(wide.to(at::kDouble) / temperature, -1);
      const auto entropy = -(exact.exp() * exact).sum(-1);
      EXPECT_TRUE(at::allclose(entropies_of(statistics).to(at::kDouble), entropy, 1e-5, 1e-5));
      // A row alone, somewhere else.
      EXPECT_TRUE(same_bytes(row_statistics(logits.narrow(0, 7, 1).clone(), labels.narrow(0, 7, 1),
                                            range, temperature),
                             statistics.narrow(1, 7, 1)));
    }
  }
}

TEST_F(CudaKernels, LogitsBecomeTheirGradient) {
  const std::int64_t rows = 50, vocabulary = 20000, padding = 32;
  for (const auto dtype : {at::kBFloat16, at::kFloat})
    for (const double temperature : {1.0, 0.7}) {
      auto logits = (random({rows, vocabulary + padding}, dtype) * 4).detach();
      const auto on_gpu = at::TensorOptions(at::kLong).device(at::kCUDA);
      const auto labels = at::randint(vocabulary, {rows}, on_gpu);
      const auto of_log_prob = random({rows}, at::kFloat);
      const auto of_entropy = random({rows}, at::kFloat);
      const VocabularyRange range{.first = 0, .count = vocabulary};
      auto wide = logits.narrow(1, 0, vocabulary).to(at::kDouble).requires_grad_();
      const auto p = at::log_softmax(wide / temperature, -1);
      const auto log_prob = p.gather(1, labels.unsqueeze(1)).squeeze(1);
      ((log_prob * of_log_prob).sum() - (p.exp() * p).sum(-1).mul(of_entropy).sum()).backward();
      const auto statistics = row_statistics(logits, labels, range, temperature);
      logits_to_gradient(logits, statistics, labels, of_log_prob, of_entropy, range, temperature);
      const auto got = logits.narrow(1, 0, vocabulary).to(at::kDouble);
      const auto error = ((got - wide.grad()).norm() / wide.grad().norm()).item<double>();
      EXPECT_LT(error, dtype == at::kFloat ? 1e-5 : 3e-3);
      EXPECT_EQ(logits.narrow(1, vocabulary, padding).abs().max().item<float>(), 0);
    }
}

TEST_F(CudaKernels, SplitOfQueriesKeysAndValuesIsThatOfItsParts) {
  const std::int64_t tokens = 70, groups = 2, queries = 3, dim = 64;
  const auto mixed = random({tokens, groups, queries + 2, dim}).detach().requires_grad_();
  const auto angles = random({tokens, 1, dim / 2}, at::kFloat) * 100;
  const auto both = at::cat({angles, angles}, -1);
  const RotaryAngles turn{.cos = both.cos().to(at::kBFloat16), .sin = both.sin().to(at::kBFloat16)};
  for (const bool turned : {false, true}) {
    const auto rotate = [&](const at::Tensor& x) {
      return turned ? x * turn.cos + rotate_half(x) * turn.sin : x;
    };
    const std::vector<at::Tensor> expected{
        rotate(mixed.narrow(2, 0, queries).reshape({tokens, groups * queries, dim})),
        rotate(mixed.select(2, queries)), mixed.select(2, queries + 1)};
    const auto got = split_qkv(mixed, {.first = 0, .count = queries}, turned ? &turn : nullptr);
    const std::vector<at::Tensor> parts{got.query, got.key, got.value};
    std::vector<at::Tensor> grads;
    for (const auto& part : parts) grads.push_back(random(part.sizes()));
    const auto gradient = [&](const std::vector<at::Tensor>& of) {
      mixed.mutable_grad() = at::Tensor();
      at::Tensor sum = at::zeros({}, mixed.options().dtype(at::kDouble));
      for (std::size_t i = 0; i < 3; ++i)
        sum = sum + (of[i].to(at::kDouble) * grads[i].to(at::kDouble)).sum();
      sum.backward();
      return mixed.grad();
    };
    for (std::size_t i = 0; i < 3; ++i)
      EXPECT_TRUE(same_bytes(parts[i].detach(), expected[i].detach()));
    EXPECT_TRUE(same_bytes(gradient(parts), gradient(expected)));
  }
}

// Sets the regime of docs/numerics.md, in which Hugging Face's linear does not split K.
class NoSplitK {
 public:
  NoSplitK() {
    at::globalContext().setBlasPreferredBackend(at::BlasBackend::Cublaslt);
    at::globalContext().setAllowBF16ReductionCuBLAS(false, /*allow_splitk=*/false);
  }
  ~NoSplitK() {
    at::globalContext().setAllowBF16ReductionCuBLAS(true, true);
    at::globalContext().setBlasPreferredBackend(at::BlasBackend::Cublas);
  }
  NoSplitK(const NoSplitK&) = delete;
  NoSplitK& operator=(const NoSplitK&) = delete;
};

TEST_F(CudaKernels, ProductsDoNotDependOnRowsOrSlices) {
  const NoSplitK regime;
  struct Shape {
    std::int64_t n, k;
    bool has_bias;
  };
  for (const auto& [n, k, has_bias] :
       {Shape{2048, 1536, true}, Shape{1536, 8960, false}, Shape{896, 4864, false},
        Shape{1024, 4096, false}, Shape{576, 7168, false}, Shape{60, 2048, false},
        Shape{8, 4096, false}, Shape{1, 1536, true}, Shape{1, 2048, false},
        Shape{2048, 5632, false}}) {
    const auto name = std::to_string(n) + "x" + std::to_string(k);
    const auto x = random({2048, k});
    const auto weight = random({n, k}) * 0.02;
    const auto bias = has_bias ? random({n}) : at::Tensor();
    const auto expected = gemm_nt(x, weight, bias);
    if (n > 1 || !has_bias) {
      EXPECT_TRUE(same_bytes(expected,
                             at::linear(x, weight, has_bias ? std::optional(bias) : std::nullopt)))
          << name;
    }
    for (const std::int64_t rows : {1, 2, 3, 8, 16, 17, 33, 64, 100, 128, 300, 512, 1000})
      EXPECT_TRUE(
          same_bytes(gemm_nt(x.narrow(0, 0, rows), weight, bias), expected.narrow(0, 0, rows)))
          << name << ", rows " << rows;
    for (const std::int64_t parts : {2, 4, 8}) {
      if (n % parts != 0 || n < 16) continue;
      for (const std::int64_t part : {std::int64_t{0}, parts - 1})
        for (const std::int64_t rows : {1, 17, 256})
          EXPECT_TRUE(same_bytes(
              gemm_nt(x.narrow(0, 5, rows), weight.narrow(0, part * n / parts, n / parts),
                      has_bias ? bias.narrow(0, part * n / parts, n / parts) : bias),
              expected.narrow(0, 5, rows).narrow(1, part * n / parts, n / parts)))
              << name << ", slice " << part << " of " << parts << ", rows " << rows;
    }
  }
}

// x [m, k] times w [n, k], written out.
at::Tensor chains_of(const at::Tensor& x, const at::Tensor& weight) {
  const auto rows = x.to(at::kCPU, at::kFloat);
  const auto columns = weight.to(at::kCPU, at::kFloat);
  auto y = at::empty({x.size(0), weight.size(0)});
  const auto of_x = rows.accessor<float, 2>();
  const auto of_w = columns.accessor<float, 2>();
  auto of_y = y.accessor<float, 2>();
  for (std::int64_t i = 0; i < x.size(0); ++i)
    for (std::int64_t j = 0; j < weight.size(0); ++j) {
      float sum = 0;
      for (std::int64_t k = 0; k < x.size(1); ++k) sum = std::fma(of_x[i][k], of_w[j][k], sum);
      of_y[i][j] = sum;
    }
  return y;
}

// Few rows, few tiles, many tiles; depths that loads of four numbers, and parts of K, divide or
// not.
TEST_F(CudaKernels, ProductsOfFloatAreOneChainOfFusedMultiplyAdds) {
  struct Shape {
    std::int64_t m, n, k;
  };
  for (const auto& [m, n, k] :
       {Shape{33, 65, 70}, Shape{1, 64, 2048}, Shape{3, 9, 1030}, Shape{17, 7, 257},
        Shape{300, 60, 36}, Shape{1000, 70, 37}, Shape{1030, 65, 64}, Shape{2, 3, 1}}) {
    SCOPED_TRACE(fmt::format("{} x {} x {}", m, n, k));
    const auto x = random({m, k}, at::kFloat);
    const auto weight = random({n, k}, at::kFloat);
    EXPECT_TRUE(at::equal(gemm_nt(x, weight, {}).cpu(), chains_of(x, weight)));
    const auto bias = random({n}, at::kFloat);
    EXPECT_TRUE(at::equal(gemm_nt(x, weight, bias), gemm_nt(x, weight, {}) + bias));
    const auto narrow_x = x.to(at::kBFloat16);
    const auto narrow_weight = weight.to(at::kBFloat16);
    EXPECT_TRUE(same_bytes(gemm_nt_in_fp32(narrow_x, narrow_weight),
                           gemm_nt(narrow_x.to(at::kFloat), narrow_weight.to(at::kFloat), {})));
  }
  const auto wide = random({1024, 7168}, at::kFloat);
  const auto router = random({256, 7168}, at::kFloat);
  const auto of_all = gemm_nt(wide, router, {});
  for (const std::int64_t rows : {1, 16, 17, 200})
    EXPECT_TRUE(same_bytes(gemm_nt(wide.narrow(0, 7, rows), router.narrow(0, 64, 64), {}),
                           of_all.narrow(0, 7, rows).narrow(1, 64, 64)))
        << rows;
}

TEST_F(CudaKernels, RoutersProductsAreThoseInFp32) {
  const at::NoGradGuard no_grad;
  const auto weight = random({160, 2048});
  for (const std::int64_t rows : {1, 4, 5, 100}) {
    const auto x = random({rows, 2048});
    const auto bitwise = linear_in_fp32(x, weight, Alignment::kBitwise);
    EXPECT_TRUE(same_bytes(
        bitwise, linear(x.to(at::kFloat), weight.to(at::kFloat), {}, Alignment::kBitwise)));
    const auto fast = linear_in_fp32(x, weight, Alignment::kFast);
    EXPECT_EQ(fast.scalar_type(), at::kFloat);
    EXPECT_TRUE(at::allclose(fast, bitwise, 1e-4, 1e-3));
  }
}

TEST_F(CudaKernels, ProductsCarryGradients) {
  for (const bool has_bias : {false, true}) {
    const auto x = random({40, 256}).requires_grad_();
    const auto weight = random({96, 256}).requires_grad_();
    const auto bias = has_bias ? random({96}).requires_grad_() : at::Tensor();
    const auto grad = random({40, 96});
    const auto run = [&](Alignment alignment) {
      for (const auto& leaf : {x, weight, bias})
        if (leaf.defined()) leaf.mutable_grad() = at::Tensor();
      linear(x, weight, bias, alignment).backward(grad);
      std::vector<at::Tensor> grads{x.grad(), weight.grad()};
      if (has_bias) grads.push_back(bias.grad());
      return grads;
    };
    const auto fast = run(Alignment::kFast);
    const auto bitwise = run(Alignment::kBitwise);
    for (std::size_t i = 0; i < fast.size(); ++i)
      EXPECT_TRUE(at::allclose(bitwise[i], fast[i], 1e-2, 1e-2)) << i;
  }
}

class Sum : public MainGradHook {
 public:
  explicit Sum(at::Tensor& memory, int& times) : memory_(memory), times_(times) {}
  void operator()(const at::Tensor& leaf) override {
    EXPECT_FALSE(leaf.grad().defined());
    ++times_;
  }
  at::Tensor main_grad() const override { return memory_; }

 private:
  at::Tensor& memory_;
  int& times_;
};

TEST_F(CudaKernels, ProductsAddTheirWeightsGradientsInFp32) {
  for (const auto alignment : {Alignment::kBitwise, Alignment::kFast}) {
    auto weight = random({256, 192}).requires_grad_();
    auto sum = at::zeros({256, 192}, weight.options().dtype(at::kFloat).requires_grad(false));
    auto expected = at::zeros_like(sum).to(at::kDouble);
    int times = 0;
    torch::autograd::impl::set_post_acc_grad_hooks(weight, std::make_unique<Sum>(sum, times));
    for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
      const auto x = random({500, 192}).requires_grad_();
      const auto grad = random({500, 256});
      linear(x, weight, {}, alignment).backward(grad);
      expected += at::matmul(grad.t().to(at::kDouble), x.detach().to(at::kDouble));
      EXPECT_TRUE(same_bytes(x.grad(), at::matmul(grad, weight.detach())));
    }
    EXPECT_EQ(times, 3);
    EXPECT_FALSE(weight.grad().defined());
    EXPECT_LT((sum.to(at::kDouble) - expected).abs().max().item<double>(), 1e-3);
  }
}

// Qwen3's heads: the bits of the three kernels that it replaces.
TEST_F(CudaKernels, NormsAndTurnsHeadsInOneKernel) {
  const at::NoGradGuard no_grad;
  for (const auto dtype : {at::kBFloat16, at::kFloat}) {
    for (const std::int64_t tokens : {1, 7, 1000}) {
      for (const std::int64_t queries : {1, 4, 8}) {
        const auto mixed = random({tokens, 4, queries + 2, 128}, dtype);
        const HeadNorms norms{
            .query = random({128}, dtype), .key = random({128}, dtype), .epsilon = 1e-6};
        const auto angle = at::randn({tokens, 1, 128}, at::TensorOptions().device(at::kCUDA));
        const RotaryAngles angles{.cos = angle.cos().to(dtype), .sin = angle.sin().to(dtype)};
        const auto found = split_and_norm_qkv(mixed, {.first = 0, .count = queries}, norms,
                                              NormRounding::kBeforeWeight, &angles);
        const auto query = mixed.narrow(2, 0, queries).reshape({tokens, 4 * queries, 128});
        const auto key = mixed.select(2, queries).contiguous();
        EXPECT_TRUE(same_bytes(found.query,
                               apply_rotary(rms_norm(query, norms.query, norms.epsilon), angles)));
        EXPECT_TRUE(
            same_bytes(found.key, apply_rotary(rms_norm(key, norms.key, norms.epsilon), angles)));
        EXPECT_TRUE(same_bytes(found.value, mixed.select(2, queries + 1)));
      }
    }
  }
}

}  // namespace cuda_kernels_test
}  // namespace ferry::models
