// Experts of few rows, against products of single experts and grouped products.
#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

#include "models/cuda_fixture.h"
#include "models/kernels/experts/experts.h"
#include "models/kernels/product/gemm.h"
#include "models/kernels/swiglu.h"
#include "models/kernels/swiglu_cuda.h"

namespace ferry::models {
namespace {

struct FewRows {
  std::int64_t experts = 128, hidden = 2048, ffn = 768, topk = 8;
  ExpertWeights weights;

  FewRows() = default;
  FewRows(std::int64_t num_experts, std::int64_t hidden_size, std::int64_t ffn_size)
      : experts(num_experts), hidden(hidden_size), ffn(ffn_size) {}
  void fill() {
    const auto like = at::TensorOptions().device(at::kCUDA).dtype(at::kBFloat16);
    weights.fc1 = at::randn({experts, 2 * ffn, hidden}, like) / 32;
    weights.fc2 = at::randn({experts, hidden, ffn}, like) / 32;
  }
  void fill_biases() {
    weights.fc1_bias = at::randn({experts, 2 * ffn}, weights.fc1.options());
    weights.fc2_bias = at::randn({experts, hidden}, weights.fc1.options());
    weights.quick = QuickGeglu{.clamp = 1.5, .offset = 1};
  }
  // The result of one row.
  at::Tensor expected(const at::Tensor& row, std::int64_t expert) const {
    const auto of = [&](const at::Tensor& x) { return x.defined() ? x[expert] : x; };
    const auto gate_up = at::linear(row, of(weights.fc1), of(weights.fc1_bias));
    const auto hidden_row = weights.quick ? quick_geglu(gate_up, *weights.quick) : swiglu(gate_up);
    return at::linear(hidden_row, of(weights.fc2), of(weights.fc2_bias))[0];
  }
  at::Tensor choose(std::int64_t tokens) const {
    return at::rand({tokens, experts}, at::TensorOptions().device(at::kCUDA))
        .argsort(/*stable=*/true, -1, /*descending=*/false)
        .narrow(1, 0, topk)
        .contiguous();
  }
};

class FewExpertKernels : public CudaKernels {};

// The results of choices, in their own order, by the kernels that read an expert once.
at::Tensor by_kernels(const at::Tensor& x, const at::Tensor& experts, const FewRows& sizes) {
  const auto places = expert_order(experts.flatten(), {0, sizes.experts});
  const auto hidden = gated_expert_products(x, places, sizes.topk, sizes.weights);
  return expert_products(hidden, places.ends, sizes.weights.fc2, sizes.weights.fc2_bias)
      .index_select(0, places.inverse);
}

TEST_F(FewExpertKernels, RowsAreThoseOfTheirExperts) {
  std::vector<FewRows> shapes{FewRows(), FewRows(8, 128, 64), FewRows(16, 2048, 1408),
                              FewRows(8, 128, 192), FewRows(16, 2880, 2880)};
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    auto& sizes = shapes[i];
    sizes.fill();
    if (i >= 3) sizes.fill_biases();
    ASSERT_TRUE(serves_experts(sizes.weights, Alignment::kFast));
    for (const std::int64_t tokens : {1, 2, 7, 32}) {
      const auto x = random({tokens, sizes.hidden});
      const auto experts = sizes.choose(tokens);
      const auto found = by_kernels(x, experts, sizes);
      const auto of = experts.cpu();
      for (std::int64_t choice = 0; choice < experts.numel(); ++choice) {
        const auto expert = of.const_data_ptr<std::int64_t>()[choice];
        const auto row = x.narrow(0, choice / sizes.topk, 1);
        const auto expected = sizes.expected(row, expert);
        const auto scale = expected.abs().max().item<float>();
        EXPECT_LT((found[choice] - expected).abs().max().item<float>(), 0.02F * scale)
            << "choice " << choice << " of " << tokens << " tokens";
      }
    }
  }
  EXPECT_FALSE(
      serves_experts({.fc1 = random({8, 80, 96}), .fc2 = random({8, 96, 40})}, Alignment::kFast));
}

// The results of choices as a layer of kBitwise has them: grouped products, biases added to what
// these round to, and the activation.
at::Tensor by_grouped_products(const at::Tensor& x,
                               const at::Tensor& experts,
                               const FewRows& sizes) {
  const auto& [fc1, fc2, fc1_bias, fc2_bias, quick] = sizes.weights;
  const auto places = expert_order(experts.flatten(), {0, sizes.experts});
  const auto rows = gather_choices(x, places, sizes.topk, experts.numel());
  const auto gate_up = at::_grouped_mm(rows, fc1.transpose(1, 2), places.ends);
  const auto hidden = quick
                          ? quick_geglu(gate_up, {.values = fc1_bias, .ends = places.ends}, *quick)
                          : swiglu(gate_up);
  auto y = at::_grouped_mm(hidden, fc2.transpose(1, 2), places.ends);
  if (fc2_bias.defined()) y = add_expert_biases(y, {.values = fc2_bias, .ends = places.ends});
  return y.index_select(0, places.inverse);
}

// Experts with none, few and many rows, of which each reading of an expert serves 64.
TEST_F(FewExpertKernels, RowsHaveTheBitsOfGroupedProducts) {
  std::vector<FewRows> shapes{FewRows(), FewRows(8, 128, 64), FewRows(16, 2048, 1408),
                              FewRows(8, 128, 192), FewRows(16, 2880, 2880)};
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    auto& sizes = shapes[i];
    sizes.fill();
    if (i >= 3) sizes.fill_biases();
    ASSERT_TRUE(serves_experts(sizes.weights, Alignment::kBitwise));
    for (const std::int64_t tokens : {1, 2, 7, 32, 300}) {
      const auto x = random({tokens, sizes.hidden});
      for (const bool of_one : {false, true}) {
        auto experts = sizes.choose(tokens);
        if (of_one) experts = experts.narrow(0, 0, 1).expand({tokens, -1}).contiguous();
        EXPECT_TRUE(
            same_bytes(by_kernels(x, experts, sizes), by_grouped_products(x, experts, sizes)))
            << tokens << " tokens, hidden " << sizes.hidden << ", of one " << of_one;
      }
    }
  }
}

TEST_F(FewExpertKernels, ARanksExpertsServeTheirOwnRows) {
  FewRows sizes;
  sizes.fill();
  const auto x = random({100, sizes.hidden});
  const auto experts = sizes.choose(100);
  const auto all = by_kernels(x, experts, sizes);
  const OwnExperts own{.first = 32, .count = 32};
  const auto places = expert_order(experts.flatten(), own);
  const auto count = places.ends[own.count - 1].item<std::int64_t>();
  ASSERT_LT(count, experts.numel());
  const ExpertWeights mine{.fc1 = sizes.weights.fc1.narrow(0, own.first, own.count),
                           .fc2 = sizes.weights.fc2.narrow(0, own.first, own.count)};
  const auto hidden = gated_expert_products(x, places, sizes.topk, mine);
  const auto found = expert_products(hidden, places.ends, mine.fc2, {});
  ASSERT_EQ(found.size(0), experts.numel());
  EXPECT_TRUE(
      same_bytes(found.narrow(0, 0, count), all.index_select(0, places.order.narrow(0, 0, count))));
}

// Columns that leave a part of a block, of gate and up and of the second product.
TEST_F(FewExpertKernels, ColumnsMayBeAnyMultipleOf8) {
  const auto x = random({70, 128});
  const auto experts =
      at::arange(70, at::TensorOptions().device(at::kCUDA).dtype(at::kLong)).remainder(3);
  const auto places = expert_order(experts, {0, 3});
  const auto rows = gather_choices(x, places, 1, 70);
  for (const std::int64_t columns : {8, 96, 200}) {
    const ExpertWeights weights{.fc1 = random({3, 2 * columns, 128})};
    const auto gate_up = at::_grouped_mm(rows, weights.fc1.transpose(1, 2), places.ends);
    EXPECT_TRUE(same_bytes(gated_expert_products(x, places, 1, weights), swiglu(gate_up)));
    EXPECT_TRUE(same_bytes(expert_products(rows, places.ends, weights.fc1, {}), gate_up));
  }
}

// Two kernels for the products of few tokens and their sum, beside those for any number.
TEST_F(FewExpertKernels, FewTokensAreSumsOfTheirChoices) {
  constexpr std::int64_t kMostOrdered = 12;  // choices of a token
  for (const std::int64_t topk : {1, 3, 4, 8, 10, 16}) {
    std::vector<FewRows> shapes{FewRows(), FewRows(16, 128, 192), FewRows(16, 96, 40),
                                FewRows(16, 2880, 2880)};
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      auto& sizes = shapes[i];
      sizes.topk = topk;
      sizes.fill();
      if (i > 0) sizes.fill_biases();
      for (const std::int64_t tokens : {1, 3, 4}) {
        const auto x = random({tokens, sizes.hidden});
        const auto experts = sizes.choose(tokens);
        std::vector<at::Tensor> one_by_one;
        const auto of = experts.cpu();
        for (std::int64_t choice = 0; choice < experts.numel(); ++choice)
          one_by_one.push_back(sizes.expected(x.narrow(0, choice / topk, 1),
                                              of.const_data_ptr<std::int64_t>()[choice]));
        const auto results = at::stack(one_by_one);
        for (const auto alignment : {Alignment::kFast, Alignment::kBitwise}) {
          const bool bitwise = alignment == Alignment::kBitwise;
          const bool has_kernel = !bitwise || (topk <= kMostOrdered && sizes.hidden % 64 == 0);
          const bool supported = few_tokens_supported(sizes.weights, experts, alignment);
          ASSERT_EQ(supported, has_kernel && (tokens == 1 || 4 * tokens * topk <= sizes.experts));
          if (!has_kernel) continue;
          for (const auto dtype : {at::kBFloat16, at::kFloat}) {
            const auto of_choices = random({tokens, topk}, dtype);
            const auto found =
                apply_experts_to_few_tokens(x, experts, of_choices, sizes.weights, alignment);
            const auto expected = combine_choices(results, {}, of_choices);
            const auto scale = expected.abs().max().item<float>();
            EXPECT_LT((found - expected).abs().max().item<float>(), 0.02F * scale);
            if (bitwise) {
              EXPECT_TRUE(same_bytes(
                  found, combine_choices(by_grouped_products(x, experts, sizes), {}, of_choices)))
                  << topk << " choices of " << tokens << " tokens, hidden " << sizes.hidden;
            }
            const auto alone = apply_experts_to_few_tokens(
                x.narrow(0, tokens - 1, 1), experts.narrow(0, tokens - 1, 1),
                of_choices.narrow(0, tokens - 1, 1), sizes.weights, alignment);
            EXPECT_TRUE(same_bytes(found.narrow(0, tokens - 1, 1), alone));
          }
        }
      }
    }
  }
  FewRows many;
  many.fill();
  const auto experts = many.choose(kMostFewTokens + 1);
  EXPECT_FALSE(few_tokens_supported(many.weights, experts, Alignment::kFast));
  EXPECT_FALSE(few_tokens_supported(many.weights, experts, Alignment::kBitwise));
}

// Logits are sums in another order than cuBLAS's, so that only clear choices must agree.
TEST_F(FewExpertKernels, RouteFewTokensInOneKernel) {
  for (const auto& [num_experts, hidden] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{128, 2048}, {60, 96}, {512, 2048}}) {
    const auto weight = random({num_experts, hidden});
    const auto x = random({kMostFewTokens, hidden});
    ASSERT_TRUE(few_routed_supported(x, weight, 8, Alignment::kFast));
    for (const bool normalize : {false, true}) {
      const auto found = route_few(x, weight, 8, normalize, Alignment::kFast);
      const auto logits = at::linear(x.to(at::kFloat), weight.to(at::kFloat)).to(at::kBFloat16);
      const auto expected = choose_experts(logits, 8, normalize, Alignment::kFast);
      const auto of_found = logits.gather(1, found.experts).to(at::kFloat);
      const auto of_expected = logits.gather(1, expected.experts).to(at::kFloat);
      EXPECT_TRUE(at::allclose(of_found, of_expected, 0.01, 0.01)) << num_experts;
      EXPECT_TRUE(
          at::allclose(found.weights.to(at::kFloat), expected.weights.to(at::kFloat), 0.05, 1e-3));
      for (std::int64_t token = 0; token < kMostFewTokens; ++token) {
        const auto alone = route_few(x.narrow(0, token, 1), weight, 8, normalize, Alignment::kFast);
        EXPECT_TRUE(same_bytes(alone.experts, found.experts.narrow(0, token, 1)));
        EXPECT_TRUE(same_bytes(alone.weights, found.weights.narrow(0, token, 1)));
      }
    }
  }
  EXPECT_FALSE(
      few_routed_supported(random({kMostFewTokens + 1, 96}), random({8, 96}), 8, Alignment::kFast));
  EXPECT_FALSE(few_routed_supported(random({1, 96}), random({64, 96}), 33, Alignment::kFast));
}

// Rows are such that sums cancel, in every second run: results are made of roundings, and many
// logits are equal.
TEST_F(FewExpertKernels, RouteFewTokensOfBitwiseHasTheBitsOfLogitsAndOfTheirChoice) {
  for (const auto& [num_experts, hidden] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {128, 2048}, {60, 128}, {512, 2048}, {200, 4096}, {16, 64}}) {
    for (const bool cancels : {false, true}) {
      auto weight = random({num_experts, hidden});
      auto x = random({kMostFewTokens, hidden});
      const auto half = hidden / 2;
      if (cancels) {
        weight.narrow(1, half, half).copy_(-weight.narrow(1, 0, half));
        x.narrow(1, half, half).copy_(x.narrow(1, 0, half));
      }
      ASSERT_TRUE(few_routed_supported(x, weight, 8, Alignment::kBitwise)) << num_experts;
      const auto logits = gemm_nt(x, weight, {});
      for (const bool normalize : {false, true}) {
        const auto expected = choose_experts(logits, 8, normalize, Alignment::kBitwise);
        for (std::int64_t tokens = 1; tokens <= kMostFewTokens; ++tokens) {
          const auto found =
              route_few(x.narrow(0, 0, tokens), weight, 8, normalize, Alignment::kBitwise);
          EXPECT_TRUE(same_bytes(found.experts, expected.experts.narrow(0, 0, tokens)));
          EXPECT_TRUE(same_bytes(found.weights, expected.weights.narrow(0, 0, tokens)))
              << tokens << " tokens, " << num_experts << " experts";
        }
      }
    }
  }
}

}  // namespace
}  // namespace ferry::models
