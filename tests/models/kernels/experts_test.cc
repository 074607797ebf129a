#include "models/kernels/experts/experts.h"

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "models/cuda_fixture.h"
#include "models/kernels/swiglu.h"
#include "models/kernels/swiglu_cuda.h"

namespace ferry::models {
namespace {

at::Tensor random_choices(std::int64_t count, std::int64_t experts, int seed) {
  std::mt19937 engine(static_cast<unsigned>(seed));
  // Skewed, so that some experts have none.
  std::geometric_distribution<std::int64_t> draw(std::min(0.6, 3.0 / static_cast<double>(experts)));
  auto choices = at::empty({count}, at::kLong);
  for (std::int64_t i = 0; i < count; ++i)
    choices.mutable_data_ptr<std::int64_t>()[i] = std::min(draw(engine), experts - 1);
  return choices;
}

// Choices of experts outside of the range come last.
void expect_order(const ExpertOrder& found, const at::Tensor& choices, OwnExperts range) {
  auto local = choices - range.first;
  local.masked_fill_(local.lt(0).logical_or(local.ge(range.count)), range.count);
  const auto* const of = local.const_data_ptr<std::int64_t>();
  std::vector<std::int64_t> order(static_cast<std::size_t>(choices.numel()));
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(i);
  std::ranges::stable_sort(order, {}, [&](std::int64_t choice) { return of[choice]; });
  const auto places = found.order.cpu();
  const auto inverse = found.inverse.cpu();
  const auto ends = found.ends.cpu();
  ASSERT_EQ(places.numel(), choices.numel());
  for (std::size_t i = 0; i < order.size(); ++i) {
    ASSERT_EQ(places.const_data_ptr<std::int64_t>()[i], order[i]);
    ASSERT_EQ(inverse.const_data_ptr<std::int64_t>()[order[i]], static_cast<std::int64_t>(i));
  }
  ASSERT_EQ(ends.numel(), range.count);
  for (std::int64_t expert = 0; expert < range.count; ++expert)
    ASSERT_EQ(ends.const_data_ptr<std::int32_t>()[expert],
              std::count_if(of, of + choices.numel(), [&](auto e) { return e <= expert; }));
}

constexpr std::int64_t kCounts[] = {0, 1, 8, 31, 1024, 1025, 40'000};

TEST(ExpertOrder, SortsStablyOnTheHost) {
  for (const auto count : kCounts) {
    const auto choices = random_choices(count, 60, 1);
    for (const auto range : {OwnExperts{0, 60}, OwnExperts{15, 15}, OwnExperts{59, 1}})
      expect_order(expert_order(choices, range), choices, range);
  }
}

class ExpertKernels : public CudaKernels {};

TEST_F(ExpertKernels, SortStably) {
  for (const auto count : kCounts) {
    for (const std::int64_t experts : {2, 60, 128, 256}) {
      const auto choices = random_choices(count, experts, 2);
      for (const auto range : {OwnExperts{0, experts}, OwnExperts{experts / 2, experts / 2}})
        expect_order(expert_order(choices.to(at::kCUDA), range), choices, range);
    }
  }
}

// Rows of tokens whose choices are `experts`, to ranks with `local` experts each, beside loops.
void expect_rows_of_ranks(const at::Tensor& experts, std::int64_t local) {
  const auto host = experts.cpu();
  const auto topk = host.size(1);
  const auto* const of = host.const_data_ptr<std::int64_t>();
  std::vector<std::int64_t> firsts;
  const auto ranks = first_of_ranks(experts, local).cpu();
  ASSERT_EQ(ranks.numel(), host.numel());
  for (std::int64_t i = 0; i < host.numel(); ++i) {
    const auto* const token = of + i / topk * topk;
    const bool is_first = std::none_of(
        token, of + i, [&](std::int64_t other) { return other / local == of[i] / local; });
    ASSERT_EQ(ranks.const_data_ptr<std::int64_t>()[i], is_first ? of[i] / local : -1);
    if (is_first) firsts.push_back(i);
  }
  const auto rows = at::tensor(firsts, at::kLong);
  const auto listed = choices_of_rows(experts, rows.to(experts.device()), local).cpu();
  ASSERT_EQ(listed.sizes(), (std::vector{rows.numel(), topk}));
  std::int64_t counted = 0;
  for (std::int64_t i = 0; i < listed.numel(); ++i) {
    const auto first = firsts[static_cast<std::size_t>(i / topk)];
    const auto expert = of[first / topk * topk + i % topk];
    const bool is_there = expert / local == of[first] / local;
    counted += is_there ? 1 : 0;
    ASSERT_EQ(listed.const_data_ptr<std::int32_t>()[i], is_there ? expert % local : -1);
  }
  EXPECT_EQ(counted, host.numel()) << "each choice belongs to one row";
}

at::Tensor distinct_choices(std::int64_t tokens, std::int64_t experts, std::int64_t topk) {
  return at::argsort(at::rand({tokens, experts}), /*stable=*/true, 1, false)
      .narrow(1, 0, topk)
      .contiguous();
}

TEST(ExpertOrder, SendsATokenOnceToEachRank) {
  at::manual_seed(5);
  for (const std::int64_t tokens : {0, 1, 500})
    for (const std::int64_t local : {1, 4, 16, 64})
      for (const std::int64_t topk : {1, 3, 8})
        expect_rows_of_ranks(distinct_choices(tokens, 64, topk), local);
}

TEST_F(ExpertKernels, SendATokenOnceToEachRank) {
  at::manual_seed(6);
  for (const std::int64_t tokens : {0, 1, 5000})
    for (const std::int64_t local : {1, 16, 64})
      for (const std::int64_t topk : {1, 3, 8})
        expect_rows_of_ranks(distinct_choices(tokens, 64, topk).to(at::kCUDA), local);
}

TEST_F(ExpertKernels, GatherTheRowsOfChoices) {
  for (const auto dtype : {at::kBFloat16, at::kFloat}) {
    for (const std::int64_t columns : {1, 7, 20, 2048, 2880}) {
      for (const std::int64_t count : {0, 1, 250, 800}) {
        const auto x = random({100, columns}, dtype);
        const auto order =
            at::randperm(800, at::TensorOptions().device(at::kCUDA).dtype(at::kLong));
        const auto found = gather_choices(x, {.order = order}, 8, count);
        const auto rows = at::div(order.narrow(0, 0, count), 8, "trunc");
        EXPECT_TRUE(same_bytes(found, x.index_select(0, rows))) << count << " of " << columns;
      }
    }
  }
}

// The sum has ATen's bits, so that logits stay equal to transformers'.
TEST_F(ExpertKernels, CombineAsAtenDoes) {
  for (const auto dtype : {at::kBFloat16, at::kFloat}) {
    for (const auto of_weights : {dtype, at::kFloat}) {
      for (const std::int64_t topk : {1, 2, 3, 4, 6, 8, 9, 10, 16}) {
        for (const std::int64_t tokens : {1, 3, 64, 1000}) {
          for (const std::int64_t hidden : {20, 2048}) {
            const auto results = random({tokens * topk, hidden}, dtype);
            const auto weights = random({tokens, topk}, of_weights).abs();
            const auto inverse =
                at::randperm(tokens * topk, at::TensorOptions().device(at::kCUDA).dtype(at::kLong));
            const auto expected = (results.index_select(0, inverse) * weights.reshape({-1, 1}))
                                      .view({tokens, topk, hidden})
                                      .sum(1)
                                      .to(dtype);
            EXPECT_TRUE(same_bytes(combine_choices(results, inverse, weights), expected))
                << tokens << " tokens, " << topk << " choices, " << hidden << " columns";
          }
        }
      }
    }
  }
}

TEST_F(ExpertKernels, CombineInTheOrderOfChoicesWithoutAnOrder) {
  const auto results = random({80, 256});
  const auto weights = random({10, 8});
  const auto inverse = at::arange(80, at::TensorOptions().device(at::kCUDA).dtype(at::kLong));
  EXPECT_TRUE(same_bytes(combine_choices(results, {}, weights),
                         combine_choices(results, inverse, weights)));
}

TEST_F(ExpertKernels, CombineWithoutTheRowsOfOtherRanks) {
  const auto weights = random({10, 8}).abs();
  const auto numbers = at::TensorOptions().device(at::kCUDA).dtype(at::kLong);
  const auto inverse = at::randperm(80, numbers);
  const auto results = random({80, 256});
  const auto end = at::full({1}, 30, numbers.dtype(at::kInt));
  auto garbage = results.clone();
  garbage.narrow(0, 30, 50).fill_(std::numeric_limits<float>::quiet_NaN());
  auto zeros = results.clone();
  zeros.narrow(0, 30, 50).zero_();
  EXPECT_TRUE(same_bytes(combine_choices(garbage, inverse, weights, end),
                         combine_choices(zeros, inverse, weights)));
  EXPECT_TRUE(same_bytes(combine_choices(garbage, inverse, weights, end).cpu(),
                         combine_choices(garbage.cpu(), inverse.cpu(), weights.cpu(), end.cpu())));
}

// The gradients of combine_choices_of(), beside those of its formula in fp64.
void expect_gradients_of_combining(at::TensorOptions like, at::ScalarType of_weights) {
  for (const std::int64_t topk : {1, 3, 8}) {
    for (const std::int64_t tokens : {0, 1, 65}) {
      for (const std::int64_t hidden : {20, 33, 2048}) {
        const auto leaf = [](const at::Tensor& x) { return x.detach().clone().requires_grad_(); };
        const auto results = leaf(at::randn({tokens * topk, hidden}, like));
        const auto weights = leaf(at::rand({tokens, topk}, like.dtype(of_weights)));
        const auto order = at::randperm(tokens * topk, like.dtype(at::kLong));
        const ExpertOrder places{.order = order, .inverse = at::argsort(order)};
        const auto grad = at::randn({tokens, hidden}, like);
        const auto y = combine_choices_of(places, results, weights);
        EXPECT_TRUE(same_bytes(y, combine_choices(results, places.inverse, weights)));
        y.backward(grad);

        const auto wide_results = leaf(results.to(at::kDouble));
        const auto wide_weights = leaf(weights.to(at::kDouble));
        (wide_results.index_select(0, places.inverse) * wide_weights.reshape({-1, 1}))
            .view({tokens, topk, hidden})
            .sum(1)
            .backward(grad.to(at::kDouble));
        const bool rounds = like.dtype() == at::kBFloat16;
        const double of_results = rounds ? 4e-3 : 1e-6;  // the rounding of a product
        EXPECT_TRUE(at::allclose(results.grad().to(at::kDouble), wide_results.grad(), of_results));
        // A sum of `hidden` products, each rounded.
        const double of_sums = rounds ? 1e-2 : 1e-5;
        EXPECT_TRUE(at::allclose(weights.grad().to(at::kDouble), wide_weights.grad(), of_sums,
                                 of_sums * std::sqrt(static_cast<double>(hidden))))
            << tokens << " tokens, " << topk << " choices, " << hidden << " columns";
        EXPECT_EQ(weights.grad().scalar_type(), of_weights);
      }
    }
  }
}

// Rows that are missing behind `end` count as zeros would.
void expect_gradients_without_rows(at::TensorOptions like, at::ScalarType of_weights) {
  constexpr std::int64_t kTokens = 40;
  constexpr std::int64_t kTopk = 6;
  for (const std::int64_t there : {0, 1, 77, 240}) {
    const auto order = at::randperm(kTokens * kTopk, like.dtype(at::kLong));
    const ExpertOrder places{.order = order, .inverse = at::argsort(order)};
    const auto end = at::full({1}, there, like.dtype(at::kInt));
    const auto weights = at::rand({kTokens, kTopk}, like.dtype(of_weights));
    const auto all = at::randn({kTokens * kTopk, 48}, like);
    all.narrow(0, there, all.size(0) - there).zero_();
    const auto some = all.narrow(0, 0, there);
    EXPECT_TRUE(same_bytes(combine_choices(some, places.inverse, weights, end),
                           combine_choices(all, places.inverse, weights)));
    const auto grads = at::randn({kTokens, 48}, like);
    const auto found = combine_choices_backward(grads, some, places, weights, end);
    const auto expected = combine_choices_backward(grads, all, places, weights);
    EXPECT_TRUE(same_bytes(found.results, expected.results.narrow(0, 0, there).contiguous()));
    EXPECT_TRUE(same_bytes(found.weights + 0, expected.weights + 0)) << "zeros have no sign";
  }
}

TEST(CombineChoices, TakesRowsThatAreMissingForZerosOnTheHost) {
  at::manual_seed(7);
  expect_gradients_without_rows(at::kFloat, at::kFloat);
  expect_gradients_without_rows(at::kBFloat16, at::kFloat);
}

TEST_F(ExpertKernels, CombineWithoutRowsThatAreMissing) {
  const at::TensorOptions gpu(at::kCUDA);
  expect_gradients_without_rows(gpu.dtype(at::kFloat), at::kFloat);
  expect_gradients_without_rows(gpu.dtype(at::kBFloat16), at::kBFloat16);
  expect_gradients_without_rows(gpu.dtype(at::kBFloat16), at::kFloat);
}

TEST(CombineChoices, HasTheGradientsOfItsFormulaOnTheHost) {
  at::manual_seed(3);
  expect_gradients_of_combining(at::kFloat, at::kFloat);
  expect_gradients_of_combining(at::kBFloat16, at::kBFloat16);
  expect_gradients_of_combining(at::kBFloat16, at::kFloat);
}

TEST_F(ExpertKernels, CombiningHasTheGradientsOfItsFormula) {
  const at::TensorOptions gpu(at::kCUDA);
  expect_gradients_of_combining(gpu.dtype(at::kFloat), at::kFloat);
  expect_gradients_of_combining(gpu.dtype(at::kBFloat16), at::kBFloat16);
  expect_gradients_of_combining(gpu.dtype(at::kBFloat16), at::kFloat);
}

// Ties are common among logits in bf16: the lower expert wins.
TEST_F(ExpertKernels, ChooseTheMostProbable) {
  for (const auto dtype : {at::kBFloat16, at::kFloat}) {
    for (const std::int64_t experts : {8, 60, 128, 512}) {
      for (const bool normalize : {false, true}) {
        const auto logits = random({333, experts}, dtype);
        const auto chosen = choose_experts(logits, 8, normalize, Alignment::kFast);
        const auto scores = at::softmax(logits, -1, at::kFloat);
        const auto [best, which] = at::sort(scores, /*stable=*/true, -1, /*descending=*/true);
        EXPECT_TRUE(at::equal(chosen.experts, which.narrow(1, 0, 8)));
        auto weights = best.narrow(1, 0, 8);
        if (normalize) weights = weights / weights.sum(-1, true);
        EXPECT_TRUE(at::allclose(chosen.weights.to(at::kFloat), weights.to(dtype).to(at::kFloat),
                                 dtype == at::kFloat ? 1e-6 : 1e-2, 1e-7));
      }
    }
  }
}

// Logits of few values, of which many are equal, and others; ATen on the whole batch.
TEST_F(ExpertKernels, ChooseAsAtenDoesInBitwise) {
  for (const auto dtype : {at::kBFloat16, at::kFloat}) {
    for (const std::int64_t experts : {8, 16, 60, 64, 128, 160, 256, 384, 512}) {
      for (const std::int64_t topk : {1, 2, 3, 4, 6, 7, 8}) {
        for (const bool few_values : {true, false}) {
          auto logits = random({777, experts}, dtype);
          if (few_values) logits = at::round(logits * 2);
          const auto [best, which] = at::topk(at::softmax(logits, -1, at::kFloat), topk, -1);
          for (const bool normalize : {false, true}) {
            const auto name = fmt::format("{} of {}, few values {}, normalized {}", topk, experts,
                                          few_values, normalize);
            const auto weights =
                (normalize ? best / best.sum(-1, /*keepdim=*/true) : best).to(dtype);
            const auto chosen = choose_experts(logits, topk, normalize, Alignment::kBitwise);
            EXPECT_TRUE(at::equal(chosen.experts, which)) << name;
            EXPECT_TRUE(same_bytes(chosen.weights, weights)) << name;
            const auto of_few =
                choose_experts(logits.narrow(0, 5, 3), topk, normalize, Alignment::kBitwise);
            EXPECT_TRUE(at::equal(of_few.experts, which.narrow(0, 5, 3))) << name;
          }
          EXPECT_TRUE(chooses_as_aten(experts, topk, logits.device())) << topk << " of " << experts;
        }
      }
    }
  }
}

// Rows of seven experts, the third of which has none, and rows behind the last.
TEST_F(ExpertKernels, GradientsOfBiasesAreSumsOfTheirExpertsRows) {
  const auto ends = at::tensor({40, 41, 41, 300, 302, 900, 1000}, at::kInt).cuda();
  const auto counts = at::tensor({40, 1, 0, 259, 2, 598, 100}, at::kLong).cuda();
  for (const auto dtype : {at::kBFloat16, at::kFloat}) {
    for (const std::int64_t columns : {70, 2880}) {
      const auto rows = random({1010, columns}, dtype);
      const auto sums = sum_expert_rows_cuda(rows, ends);
      const auto wide = rows.to(at::kDouble);
      std::int64_t begin = 0;
      for (std::int64_t expert = 0; expert < 7; ++expert) {
        const auto count = counts[expert].item<std::int64_t>();
        const auto expected = wide.narrow(0, begin, count).sum(0);
        EXPECT_TRUE(at::allclose(sums[expert].to(at::kDouble), expected,
                                 dtype == at::kFloat ? 1e-5 : 8e-3, 1e-4))
            << expert << " of " << columns;
        begin += count;
      }
      EXPECT_TRUE(same_bytes(sum_expert_rows_cuda(rows, ends), sums));
    }
  }
}

TEST_F(ExpertKernels, TheirActivationWithBiasesHasTheGradientsOfItsOperations) {
  const auto ends = at::tensor({0, 7, 7, 50, 90}, at::kInt).cuda();
  const auto counts = at::tensor({0, 7, 0, 43, 40}, at::kLong).cuda();
  for (const std::int64_t ffn : {64, 75}) {
    const auto leaf = [](const at::Tensor& x) { return x.detach().clone().requires_grad_(); };
    const auto gate_up = random({90, 2 * ffn}, at::kFloat) * 5;
    const auto biases = random({5, 2 * ffn}, at::kFloat);
    const auto grad = random({90, ffn}, at::kFloat);
    const QuickGeglu options{.clamp = 7, .offset = 1};
    const auto x = leaf(gate_up);
    const auto bias = leaf(biases);
    quick_geglu(x + bias.repeat_interleave(counts, 0), options).backward(grad);
    const auto own_x = leaf(gate_up);
    const auto own_bias = leaf(biases);
    quick_geglu(own_x, {own_bias, ends}, options).backward(grad);
    EXPECT_TRUE(at::allclose(own_x.grad(), x.grad(), 1e-4, 1e-5));
    EXPECT_TRUE(at::allclose(own_bias.grad(), bias.grad(), 1e-4, 1e-4));
    const auto sum = leaf(biases);
    add_expert_biases(gate_up, {sum, ends}).backward(gate_up);
    EXPECT_TRUE(at::allclose(sum.grad(), sum_expert_rows_cuda(gate_up, ends)));
  }
}

}  // namespace
}  // namespace ferry::models
