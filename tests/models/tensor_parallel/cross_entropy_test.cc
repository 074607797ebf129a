// The fused output layer against the same loss by LibTorch's own functions on all logits at once.
#include "models/tensor_parallel/cross_entropy.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <limits>
#include <mutex>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"
#include "models/distributed/world.h"
#include "models/kernels/log_probs.h"
#include "models/kernels/product/linear.h"
#include "models/kernels/whole_vectors.h"
#include "models/tensor_parallel/mappings.h"

namespace ferry::models {
namespace cross_entropy_test {

constexpr std::int64_t kTokens = 45;
constexpr std::int64_t kHidden = 24;
constexpr std::int64_t kVocabulary = 100;
constexpr std::int64_t kPadded = 128;

struct Problem {
  at::Tensor hidden, weight, labels, of_log_prob, of_entropy;
  at::Tensor kept{};  // [tokens, vocabulary], bool; undefined: all
  double logits_scaling = 1;
  std::optional<double> softcap{};
};

enum class Kind { kWhole, kMasked, kCapped, kDivided };

Problem problem(at::ScalarType dtype) {
  at::manual_seed(7);
  return {.hidden = at::randn({kTokens, kHidden}).to(dtype),
          .weight = at::randn({kPadded, kHidden}).to(dtype),
          .labels = at::randint(kVocabulary, {kTokens}, at::kLong),
          .of_log_prob = at::randn({kTokens}),
          .of_entropy = at::randn({kTokens})};
}

// Masks leave a token alone to nearly all of them, the labels among them.
Problem masked_problem(at::ScalarType dtype) {
  auto p = problem(dtype);
  p.kept = at::rand({kTokens, kVocabulary}) < at::linspace(0, 1, kTokens).unsqueeze(1);
  p.kept.scatter_(1, p.labels.unsqueeze(1), true);
  return p;
}

Problem problem(at::ScalarType dtype, Kind kind) {
  auto p = kind == Kind::kMasked ? masked_problem(dtype) : problem(dtype);
  if (kind == Kind::kCapped) p.softcap = 4;
  if (kind == Kind::kDivided) p.logits_scaling = 0.7;
  return p;
}

SamplingMask mask_of(const Problem& p) {
  if (!p.kept.defined()) return {};
  SamplingMask mask{.token_ids = at::nonzero(p.kept).select(1, 1), .offsets = {0}};
  for (const auto& row : p.kept.unbind())
    mask.offsets.push_back(mask.offsets.back() + row.sum().item<std::int64_t>());
  return mask;
}

struct Result {
  at::Tensor log_probs, entropy, grad_hidden, grad_weight;
};

// In fp32 the product is Ferry's: MKL's has these bits on some processors only (docs/numerics.md).
at::Tensor logits_of(const at::Tensor& hidden, const at::Tensor& weight) {
  return hidden.scalar_type() == at::kFloat ? linear(hidden, weight, {}, Alignment::kBitwise)
                                            : at::linear(hidden, weight);
}

// The definition, in the dtype of `p`; with the logits rounded as the model's are.
Result plain(const Problem& p, at::ScalarType dtype, double temperature) {
  const auto hidden = p.hidden.to(dtype, false, true).requires_grad_();
  const auto weight = p.weight.to(dtype, false, true).requires_grad_();
  const auto products = logits_of(hidden, weight) / p.logits_scaling;
  const auto logits = soft_capped(products, p.softcap).narrow(1, 0, kVocabulary);
  const auto wide = dtype == at::kDouble ? logits : logits.to(at::kFloat);
  const auto cut =
      p.kept.defined() ? wide.masked_fill(~p.kept, -std::numeric_limits<double>::infinity()) : wide;
  const auto log_p = at::log_softmax(temperature == 1 ? cut : cut / temperature, -1);
  const auto log_probs = log_p.gather(1, p.labels.unsqueeze(1)).squeeze(1);
  const auto finite = p.kept.defined() ? log_p.masked_fill(~p.kept, 0) : log_p;
  const auto entropy = -(log_p.exp() * finite).sum(-1);
  (log_probs * p.of_log_prob + entropy * p.of_entropy).sum().backward();
  return {log_probs.detach(), entropy.detach(), hidden.grad(), weight.grad()};
}

OutputHead head_of(const Problem& p,
                   const at::Tensor& weight,
                   const ProcessGroup& group,
                   Alignment alignment,
                   std::int64_t chunk) {
  return {.weight = weight,
          .vocab_size = kVocabulary,
          .logits_scaling = p.logits_scaling,
          .softcap = p.softcap,
          .parallel = {.group = &group, .alignment = alignment},
          .chunk_tokens = chunk};
}

Result fused(const Problem& p,
             double temperature,
             std::int64_t chunk,
             const ProcessGroup& group = {},
             Alignment alignment = Alignment::kBitwise) {
  const auto rows = kPadded / group.size();
  const auto hidden = p.hidden.clone().requires_grad_();
  const auto weight = p.weight.narrow(0, group.rank() * rows, rows).clone().requires_grad_();
  const auto [log_probs, entropy] =
      linear_log_probs(copy_to_tensor_model_parallel_region(hidden, group), p.labels,
                       head_of(p, weight, group, alignment, chunk), temperature, mask_of(p));
  (log_probs * p.of_log_prob + entropy * p.of_entropy).sum().backward();
  return {log_probs.detach(), entropy.detach(), hidden.grad(), weight.grad()};
}

double error(const at::Tensor& got, const at::Tensor& exact) {
  return ((got.to(at::kDouble) - exact).norm() / exact.norm()).item<double>();
}

class LinearLogProbs : public testing::TestWithParam<Kind> {};

INSTANTIATE_TEST_SUITE_P(
    WholeMaskedCappedAndDivided,
    LinearLogProbs,
    testing::Values(Kind::kWhole, Kind::kMasked, Kind::kCapped, Kind::kDivided));

TEST_P(LinearLogProbs, HaveTheBytesOfLogSoftmaxWhateverTheChunk) {
  for (const auto dtype : {at::kBFloat16, at::kFloat})
    for (const double temperature : {1.0, 0.7}) {
      const auto p = problem(dtype, GetParam());
      const auto expected = plain(p, dtype, temperature);
      // A product's rows do not depend on their number from 16 on; fewer are padded to it.
      for (const std::int64_t chunk : {1, 16, 20, 45, 1000}) {
        const auto got = fused(p, temperature, chunk);
        EXPECT_TRUE(at::equal(got.log_probs, expected.log_probs)) << chunk;
        EXPECT_TRUE(at::allclose(got.entropy, expected.entropy, 1e-5, 1e-5)) << chunk;
      }
    }
}

TEST_P(LinearLogProbs, GradientsAreAtMostTwiceAsFarFromFp64AsThoseOfTheDefinition) {
  for (const auto dtype : {at::kBFloat16, at::kFloat})
    for (const double temperature : {1.0, 0.7}) {
      const auto p = problem(dtype, GetParam());
      const auto exact = plain(p, at::kDouble, temperature);
      const auto usual = plain(p, dtype, temperature);
      for (const std::int64_t chunk : {20, 1000}) {
        const auto got = fused(p, temperature, chunk);
        EXPECT_LE(error(got.grad_hidden, exact.grad_hidden),
                  2 * error(usual.grad_hidden, exact.grad_hidden));
        EXPECT_LE(error(got.grad_weight, exact.grad_weight),
                  2 * error(usual.grad_weight, exact.grad_weight));
        EXPECT_EQ(
            got.grad_weight.narrow(0, kVocabulary, kPadded - kVocabulary).abs().max().item<float>(),
            0);
      }
    }
}

TEST_P(LinearLogProbs, GradientsInFp32AreTheSameBytesWithAnyNumberOfThreads) {
  const auto threads = at::get_num_threads();
  const auto p = problem(at::kFloat, GetParam());
  at::set_num_threads(1);
  const auto expected = fused(p, 0.9, 20);
  for (const int count : {2, 3, 4}) {
    at::set_num_threads(count);
    const auto got = fused(p, 0.9, 20);
    EXPECT_TRUE(at::equal(got.grad_hidden, expected.grad_hidden)) << count;
    EXPECT_TRUE(at::equal(got.grad_weight, expected.grad_weight)) << count;
  }
  at::set_num_threads(threads);
}

TEST_P(LinearLogProbs, AreTheSameBytesOverTensorParallelRanksInBitwiseAndNearInFast) {
  for (const auto alignment : {Alignment::kBitwise, Alignment::kFast}) {
    const auto p = problem(at::kBFloat16, GetParam());
    const auto expected = fused(p, 0.9, 20);
    for (const int ranks : {2, 4}) {  // of four, the last one has padding alone
      std::vector<Result> results(static_cast<std::size_t>(ranks));
      run_ranks(ranks, {}, [&](World& world) {
        std::vector<int> all(static_cast<std::size_t>(ranks));
        std::iota(all.begin(), all.end(), 0);
        const ProcessGroup group(world, "tp", all);
        results[static_cast<std::size_t>(world.rank())] = fused(p, 0.9, 20, group, alignment);
      });
      std::vector<at::Tensor> weights;
      for (const auto& result : results) {
        weights.push_back(result.grad_weight);
        if (alignment == Alignment::kBitwise) {
          EXPECT_TRUE(at::equal(result.log_probs, expected.log_probs));
          EXPECT_TRUE(at::equal(result.entropy, expected.entropy));
        } else {
          EXPECT_TRUE(at::allclose(result.log_probs, expected.log_probs, 1e-5, 1e-5));
          EXPECT_TRUE(at::allclose(result.entropy, expected.entropy, 1e-5, 1e-5));
        }
        EXPECT_LT(error(result.grad_hidden, expected.grad_hidden.to(at::kDouble)), 5e-3);
      }
      const auto whole = at::cat(weights);
      if (alignment == Alignment::kBitwise)
        EXPECT_TRUE(at::equal(whole, expected.grad_weight));
      else
        EXPECT_LT(error(whole, expected.grad_weight.to(at::kDouble)), 5e-3);
    }
  }
}

TEST(LinearCrossEntropy, IsTheWeightedSumWithItsGradient) {
  for (const auto& [chunk, kind] : {std::pair<std::int64_t, Kind>{20, Kind::kWhole},
                                    {1000, Kind::kWhole},
                                    {20, Kind::kCapped},
                                    {20, Kind::kDivided}}) {
    auto p = problem(at::kFloat, kind);
    p.of_entropy.zero_();
    const auto expected = fused(p, 1, chunk);
    const ProcessGroup alone;
    const auto hidden = p.hidden.clone().requires_grad_();
    const auto weight = p.weight.clone().requires_grad_();
    const auto got = linear_cross_entropy(hidden, p.labels, -p.of_log_prob,
                                          head_of(p, weight, alone, Alignment::kBitwise, chunk));
    EXPECT_TRUE(at::equal(got.log_probs, expected.log_probs));
    EXPECT_TRUE(at::allclose(got.loss, (p.of_log_prob * expected.log_probs).sum()));
    (got.loss * 0.5).backward();
    EXPECT_TRUE(at::allclose(hidden.grad(), expected.grad_hidden * 0.5, 1e-5, 1e-6));
    EXPECT_TRUE(at::allclose(weight.grad(), expected.grad_weight * 0.5, 1e-5, 1e-6));
    const at::NoGradGuard no_grad;
    const auto scored = linear_cross_entropy(hidden, p.labels, -p.of_log_prob,
                                             head_of(p, weight, alone, Alignment::kBitwise, chunk));
    EXPECT_TRUE(at::equal(scored.loss, got.loss.detach()));
  }
}

TEST(OutputLayer, RefusesATemperatureOfZero) {
  const auto p = problem(at::kFloat);
  EXPECT_THROW((void)fused(p, 0, 10), Error);
}

}  // namespace cross_entropy_test
}  // namespace ferry::models
