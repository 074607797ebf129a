#include "models/kernels/delta/delta_rule.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "models/spec/transformer_config.h"

namespace ferry::models {
namespace delta_rule_test {

constexpr std::int64_t kKeyDim = 16;
constexpr std::int64_t kValueDim = 24;

DeltaRows random_rows(std::int64_t tokens, at::ScalarType dtype = at::kFloat) {
  at::manual_seed(1);
  return {.query = at::randn({1, tokens, 2, kKeyDim}).to(dtype),
          .key = at::randn({1, tokens, 2, kKeyDim}).to(dtype),
          .value = at::randn({1, tokens, 4, kValueDim}).to(dtype),
          .decay = -at::rand({1, tokens, 4}),
          .beta = at::rand({1, tokens, 4}).to(dtype)};
}

DeltaRows part(const DeltaRows& rows, std::int64_t begin, std::int64_t end) {
  const auto of = [&](const at::Tensor& x) { return x.slice(1, begin, end); };
  return {of(rows.query), of(rows.key), of(rows.value), of(rows.decay), of(rows.beta)};
}

// S <- exp(g) S; S <- S + k (beta (v - k S)); o = q S: head by head, number by number, in fp64.
std::vector<double> by_definition(const DeltaRows& rows) {
  const auto wide = [](const at::Tensor& x) { return x.to(at::kDouble).contiguous(); };
  const auto normed = [&](const at::Tensor& x) {
    const auto y = wide(x);
    return (y / (y.pow(2).sum(-1, true) + 1e-6).sqrt()).contiguous();
  };
  const auto query = normed(rows.query);
  const auto key = normed(rows.key);
  const auto value = wide(rows.value);
  const auto decay = wide(rows.decay);
  const auto beta = wide(rows.beta);
  const auto tokens = key.size(1);
  std::vector<double> out(static_cast<std::size_t>(value.numel()));
  const auto q = query.accessor<double, 4>();
  const auto k = key.accessor<double, 4>();
  const auto v = value.accessor<double, 4>();
  const auto g = decay.accessor<double, 3>();
  const auto b = beta.accessor<double, 3>();
  for (std::int64_t head = 0; head < 4; ++head) {
    std::vector<double> state(kKeyDim * kValueDim, 0.0);
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (auto& one : state) one *= std::exp(g[0][t][head]);
      for (std::int64_t j = 0; j < kValueDim; ++j) {
        const auto at = [&](std::int64_t i) -> double& {
          return state[static_cast<std::size_t>(i * kValueDim + j)];
        };
        double held = 0;
        for (std::int64_t i = 0; i < kKeyDim; ++i) held += k[0][t][head / 2][i] * at(i);
        const double delta = b[0][t][head] * (v[0][t][head][j] - held);
        double read = 0;
        for (std::int64_t i = 0; i < kKeyDim; ++i) {
          at(i) += k[0][t][head / 2][i] * delta;
          read += q[0][t][head / 2][i] / std::sqrt(kKeyDim) * at(i);
        }
        out[static_cast<std::size_t>((t * 4 + head) * kValueDim + j)] = read;
      }
    }
  }
  return out;
}

double largest_difference(const at::Tensor& output, const std::vector<double>& expected) {
  const auto flat = output.to(at::kDouble).flatten();
  return (flat - at::tensor(expected, at::kDouble)).abs().max().item<double>();
}

TEST(DeltaRule, InChunksIsTheRecurrenceOfItsDefinition) {
  const auto rows = random_rows(150);
  const auto expected = by_definition(rows);
  for (const auto alignment : {Alignment::kFast, Alignment::kBitwise})
    EXPECT_LT(largest_difference(chunk_gated_delta_rule(rows, {}, alignment).output, expected),
              1e-5);
}

TEST(DeltaRule, TokenByTokenIsTheRecurrenceOfItsDefinition) {
  const auto rows = random_rows(70);
  const auto result = recurrent_gated_delta_rule(rows, {});
  EXPECT_LT(largest_difference(result.output, by_definition(rows)), 1e-5);
  const auto state = chunk_gated_delta_rule(rows, {}, Alignment::kFast).state;
  EXPECT_LT((result.state - state).abs().max().item<double>(), 1e-5);
}

TEST(DeltaRule, GoesOnFromTheStateOfTheTokensBefore) {
  const auto rows = random_rows(100);
  const auto whole = chunk_gated_delta_rule(rows, {}, Alignment::kFast);
  const auto begin = chunk_gated_delta_rule(part(rows, 0, 37), {}, Alignment::kFast);
  const auto end = recurrent_gated_delta_rule(part(rows, 37, 100), begin.state);
  EXPECT_LT((end.output - whole.output.slice(1, 37)).abs().max().item<double>(), 1e-5);
}

TEST(DeltaRule, HasTheBitsOfTheWholeSequenceBehindAnyChunk) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto rows = random_rows(300, dtype);
    const auto whole = chunk_gated_delta_rule(rows, {}, Alignment::kBitwise).output;
    for (const std::int64_t cut : {64, 128, 256}) {
      // The rows behind the last whole chunk are not in its state.
      const auto begin = chunk_gated_delta_rule(part(rows, 0, cut + 40), {}, Alignment::kBitwise);
      EXPECT_TRUE(at::equal(begin.output, whole.slice(1, 0, cut + 40))) << cut;
      const auto end =
          chunk_gated_delta_rule(part(rows, cut, 300), begin.state_of_chunks, Alignment::kBitwise);
      EXPECT_TRUE(at::equal(end.output, whole.slice(1, cut))) << cut;
    }
  }
}

TEST(DeltaRule, HasTheBitsOfAllHeadsInAnyPartOfThem) {
  const auto rows = random_rows(130);
  const auto whole = chunk_gated_delta_rule(rows, {}, Alignment::kBitwise).output;
  const auto heads = [](const at::Tensor& x, std::int64_t begin, std::int64_t count) {
    return x.narrow(2, begin, count);
  };
  const DeltaRows second{.query = heads(rows.query, 1, 1),
                         .key = heads(rows.key, 1, 1),
                         .value = heads(rows.value, 2, 2),
                         .decay = heads(rows.decay, 2, 2),
                         .beta = heads(rows.beta, 2, 2)};
  EXPECT_TRUE(at::equal(chunk_gated_delta_rule(second, {}, Alignment::kBitwise).output,
                        heads(whole, 2, 2)));
}

TEST(CausalConvolution, OfOneTokenHasTheBitsOfTheSequence) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    at::manual_seed(2);
    const auto x = at::randn({40, 22}).to(dtype);
    const auto weight = at::randn({22, 1, 4}).to(dtype);
    const auto whole = causal_conv1d(x, {}, weight);
    EXPECT_TRUE(at::equal(causal_conv1d(x.narrow(0, 10, 30), x.narrow(0, 7, 3), weight),
                          whole.narrow(0, 10, 30)));
    EXPECT_TRUE(
        at::equal(causal_conv1d_update(x.narrow(0, 20, 1), x.narrow(0, 17, 3).unsqueeze(0), weight),
                  whole.narrow(0, 20, 1)));
  }
}

}  // namespace delta_rule_test
}  // namespace ferry::models
