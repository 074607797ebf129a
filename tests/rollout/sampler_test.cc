// The sampler beside formulas written out plainly; on a GPU, token for token as on the host.
#include "rollout/sampler.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <vector>

#include "models/kernels/log_probs.h"

namespace ferry::rollout {
namespace sampler_test {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<SamplingRow> rows_of(const SamplingParams& params, std::int64_t count) {
  std::vector<SamplingRow> rows;
  for (std::int64_t i = 0; i < count; ++i)
    rows.push_back({.params = &params, .seed = 7, .request = 11, .position = i});
  return rows;
}

std::vector<std::int64_t> integers(const at::Tensor& x) {
  const auto host = x.cpu().contiguous();
  const auto* values = host.const_data_ptr<std::int64_t>();
  return {values, values + host.numel()};
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() &&
         at::equal(a.cpu().flatten().view(at::kByte), b.cpu().flatten().view(at::kByte));
}

// `count` draws from one row of logits, at different positions.
std::vector<std::int64_t> draws(const at::Tensor& row,
                                const SamplingParams& params,
                                std::int64_t count) {
  const auto rows = rows_of(params, count);
  return integers(sample(row.expand({count, row.size(0)}).contiguous(), row.size(0), rows).tokens);
}

// Pearson's statistic of draws from the softmax of `row`; tokens that have no chance may not occur.
double chi_square(const at::Tensor& row, const std::vector<std::int64_t>& tokens) {
  const auto p = at::softmax(row.to(at::kDouble), 0);
  std::vector<double> seen(static_cast<std::size_t>(row.size(0)));
  for (const auto token : tokens) ++seen[static_cast<std::size_t>(token)];
  double statistic = 0;
  for (std::int64_t i = 0; i < row.size(0); ++i) {
    const double expected = p[i].item<double>() * static_cast<double>(tokens.size());
    const double got = seen[static_cast<std::size_t>(i)];
    if (expected > 0)
      statistic += (got - expected) * (got - expected) / expected;
    else
      EXPECT_EQ(got, 0) << i;
  }
  return statistic;
}

constexpr std::int64_t kDraws = 40000;
constexpr double kBound9 = 33.7;  // of 9 degrees of freedom; more has a chance of 1e-4

TEST(Sampler, DrawsHaveTheProbabilitiesOfTheSoftmax) {
  at::manual_seed(1);
  const auto row = at::randn({10});
  EXPECT_LT(chi_square(row, draws(row, {}, kDraws)), kBound9);
  EXPECT_LT(chi_square(row / 0.5, draws(row, {.temperature = 0.5}, kDraws)), kBound9);
  EXPECT_LT(chi_square(at::zeros({10}), draws(at::zeros({10}), {}, kDraws)), kBound9);
}

TEST(Sampler, TruncatedDrawsHaveTheProbabilitiesOfWhatIsKept) {
  const auto row = at::tensor({0.5F, 3.0F, 1.0F, 2.0F, -1.0F, 2.5F, 0.0F, 1.5F, -2.0F, -0.5F});
  const auto only = [&](std::initializer_list<std::int64_t> kept) {
    auto left = at::full_like(row, -kInfinity);
    for (const auto token : kept) left[token] = row[token];
    return left;
  };
  EXPECT_LT(chi_square(only({1, 5, 3, 7}), draws(row, {.top_k = 4}, kDraws)), kBound9);
  // softmax: 1 has 0.39, 5 0.24, 3 0.14, 7 0.09: together 0.86.
  EXPECT_LT(chi_square(only({1, 5, 3}), draws(row, {.top_p = 0.7}, kDraws)), kBound9);
  // e^-1 = 0.37, e^-1.5 = 0.22
  EXPECT_LT(chi_square(only({1, 5, 3}), draws(row, {.min_p = 0.3}, kDraws)), kBound9);
  EXPECT_LT(chi_square(only({1, 5}), draws(row, {.top_k = 3, .top_p = 0.7, .min_p = 0.3}, kDraws)),
            kBound9);
}

// Rows of several temperatures, and one alone.
TEST(Sampler, EntropiesAreTheTrainersBytes) {
  at::manual_seed(3);
  const auto logits = (at::randn({6, 5003}) * 3).to(at::kBFloat16);
  const SamplingParams warm{.temperature = 0.7, .return_entropy = true};
  const SamplingParams plain{.return_entropy = true};
  const SamplingParams other{.temperature = 1.3};
  for (const auto& params : std::vector<std::vector<const SamplingParams*>>{
           {&warm, &plain, &warm, &other, &plain, &warm},
           {&warm, &warm, &warm, &warm, &warm, &warm}}) {
    std::vector<SamplingRow> rows;
    for (const auto* one : params)
      rows.push_back({.params = one, .position = static_cast<std::int64_t>(rows.size())});
    const auto sampled = sample(logits, 5000, rows);
    for (std::int64_t i = 0; i < logits.size(0); ++i) {
      const auto& mine = *params[static_cast<std::size_t>(i)];
      const auto statistics =
          models::row_statistics(logits.narrow(0, i, 1), sampled.tokens.narrow(0, i, 1),
                                 {.count = 5000}, mine.temperature);
      EXPECT_TRUE(
          same_bytes(sampled.processed_logprobs.narrow(0, i, 1), models::log_probs_of(statistics)));
      if (mine.return_entropy) {
        EXPECT_TRUE(
            same_bytes(sampled.entropies.narrow(0, i, 1), models::entropies_of(statistics)));
      }
    }
  }
  EXPECT_FALSE(sample(logits, 5000, rows_of(other, 6)).entropies.defined());
}

// The kept tokens of rows that ask, and the trainer's function of them; beside rows that do not.
TEST(Sampler, SamplingMasksAreWhatIsKept) {
  at::manual_seed(5);
  constexpr std::int64_t kVocab = 300;
  // There are ties, also where the cut is.
  const auto logits = (at::randn({8, kVocab + 4}) * 2).to(at::kBFloat16);
  std::vector<SamplingParams> params{{.top_k = 5},
                                     {.temperature = 0.7, .top_p = 0.8},
                                     {.temperature = 0},
                                     {.min_p = 0.2},
                                     {.top_k = 40},
                                     {.top_p = 0.3},
                                     {},
                                     {.top_k = 7, .top_p = 0.9}};
  for (const auto i : {0, 1, 3, 5, 7})
    params[static_cast<std::size_t>(i)].return_sampling_mask = true;
  for (const auto i : {1, 6, 7}) params[static_cast<std::size_t>(i)].return_entropy = true;
  std::vector<SamplingRow> rows;
  for (const auto& one : params)
    rows.push_back({.params = &one, .seed = 3, .position = static_cast<std::int64_t>(rows.size())});
  const auto sampled = sample(logits, kVocab, rows);
  auto silent = params;
  for (std::size_t i = 0; i < params.size(); ++i) {
    silent[i].return_sampling_mask = silent[i].return_entropy = false;
    rows[i].params = &silent[i];
  }
  const auto usual = sample(logits, kVocab, rows);
  EXPECT_TRUE(at::equal(sampled.tokens, usual.tokens));
  EXPECT_TRUE(same_bytes(sampled.logprobs, usual.logprobs));
  EXPECT_TRUE(at::allclose(sampled.processed_logprobs, usual.processed_logprobs, 1e-5, 2e-5));
  EXPECT_FALSE(usual.sampling_mask.defined());
  for (std::int64_t i = 0; i < logits.size(0); ++i) {
    const auto& mine = params[static_cast<std::size_t>(i)];
    const auto mask = sampled.sampling_mask.rows(i, 1);
    if (!mine.return_sampling_mask) {
      EXPECT_EQ(mask.token_ids.numel(), 0);
      continue;
    }
    const auto ids = integers(mask.token_ids);
    EXPECT_TRUE(std::ranges::is_sorted(ids));
    EXPECT_EQ(std::ranges::count(ids, sampled.tokens[i].item<std::int64_t>()), 1);
    // None from the largest on is left out but a tie, and its mass is what the formulas say.
    const auto row = logits[i].narrow(0, 0, kVocab).to(at::kFloat);
    auto kept = at::zeros({kVocab}, at::kBool);
    kept.index_fill_(0, mask.token_ids, true);
    EXPECT_GE(row.masked_select(kept).min().item<float>(),
              row.masked_select(~kept).max().item<float>());
    if (mine.top_k > 0 && mine.top_p == 1) {
      EXPECT_GE(std::ssize(ids), mine.top_k);
    }
    if (mine.top_p < 1 && mine.top_k <= 0) {
      EXPECT_GE(at::softmax(row / mine.temperature, 0).masked_select(kept).sum().item<double>(),
                mine.top_p - 1e-5);
    }
    auto cut = row.masked_fill(~kept, -kInfinity);
    if (mine.temperature != 1) cut = cut / mine.temperature;
    const auto log_p = at::log_softmax(cut, 0);
    EXPECT_TRUE(same_bytes(sampled.processed_logprobs.narrow(0, i, 1),
                           log_p.index_select(0, sampled.tokens.narrow(0, i, 1))));
    if (mine.return_entropy) {
      const auto of_kept = log_p.masked_select(kept);
      EXPECT_NEAR(sampled.entropies[i].item<float>(),
                  -(of_kept.exp() * of_kept).sum().item<float>(), 1e-5);
    }
  }
}

TEST(Sampler, NeighbouringPositionsRequestsAndSeedsAreIndependent) {
  const auto row = at::zeros({64});
  const SamplingParams params;
  // Pairs of draws, each of 64 tokens, fold into 8 x 8 cells.
  for (const int what : {0, 1, 2}) {
    std::vector<SamplingRow> rows;
    for (std::int64_t i = 0; i < kDraws; ++i) {
      SamplingRow one{.params = &params, .seed = 1, .request = 2, .position = 3};
      if (what == 0) one.position = i;
      if (what == 1) one.request = static_cast<std::uint64_t>(i);
      if (what == 2) one.seed = static_cast<std::uint64_t>(i);
      rows.push_back(one);
    }
    const auto tokens = integers(sample(row.expand({kDraws, 64}).contiguous(), 64, rows).tokens);
    std::vector<double> cells(64);
    for (std::size_t i = 0; i < tokens.size(); i += 2)
      ++cells[static_cast<std::size_t>(tokens[i] % 8 * 8 + tokens[i + 1] % 8)];
    double statistic = 0;
    const double expected = kDraws / 2.0 / 64;
    for (const auto cell : cells) statistic += (cell - expected) * (cell - expected) / expected;
    EXPECT_LT(statistic, 113.5) << what;  // 63 degrees of freedom, 1e-4
  }
}

// Rows with every kind of parameter.
struct Mixture {
  explicit Mixture(std::int64_t vocab) {
    for (const double temperature : {1.0, 0.0, 0.7, 1.3})
      for (const std::int64_t top_k : {0, 1, 5, 40, 1000000})
        for (const double top_p : {1.0, 0.9, 0.3})
          for (const double min_p : {0.0, 0.05})
            for (const double penalty : {0.0, 0.8})
              params.push_back({.temperature = temperature,
                                .top_k = top_k,
                                .top_p = top_p,
                                .min_p = min_p,
                                .repetition_penalty = 1 + penalty,
                                .presence_penalty = penalty / 2,
                                .frequency_penalty = penalty / 4});
    for (std::int64_t i = 0; i < 30; ++i) prompt.push_back(i * 7 % vocab);
    for (std::int64_t i = 0; i < 30; ++i) output.push_back(i * i % vocab);
    for (std::size_t i = 0; i < params.size(); ++i)
      rows.push_back({.params = &params[i],
                      .seed = 5 + i % 3,
                      .request = (std::uint64_t{1} << 40) + i,
                      .position = static_cast<std::int64_t>(100 + i),
                      .prompt = prompt,
                      .output = output,
                      .forbidden = i % 5 == 0 ? std::span<const std::int64_t>(forbidden)
                                              : std::span<const std::int64_t>()});
  }
  std::int64_t size() const { return static_cast<std::int64_t>(rows.size()); }

  std::vector<SamplingParams> params;
  std::vector<std::int64_t> prompt, output, forbidden{0, 1, 2};
  std::vector<SamplingRow> rows;
};

// Token i is the byte 'a' + i.
constexpr auto kLetters = R"({"added_tokens": [], "normalizer": null, "post_processor": null,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
    "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
    "model": {"type": "BPE", "merges": [], "vocab": {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4, "f": 5, "g": 6, "h": 7, "i": 8, "j": 9}}})";

TEST(Sampler, AConstrainedRowIsCutAndOthersAreAsEver) {
  const text::Tokenizer tokenizer(kLetters, "test");
  grammar::StructuredOutputManager manager(tokenizer, 10);
  const auto none = std::make_shared<const std::vector<std::int64_t>>();
  grammar::TokenConstraint constraint(manager.compile(R"({"type": "regex", "pattern": "[bij]"})"),
                                      none);
  at::manual_seed(3);
  const SamplingParams params;
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto logits = (at::randn({64, 12}) * 3).to(dtype);
    const auto free_rows = rows_of(params, 64);
    auto rows = free_rows;
    for (std::size_t i = 0; i < 64; i += 2) rows[i].constraint = &constraint;
    const auto free = sample(logits, 10, free_rows), cut = sample(logits, 10, rows);
    auto allowed = at::full({64, 10}, -kInfinity);
    for (const std::int64_t token : {1, 8, 9})
      allowed.select(1, token).copy_(logits.select(1, token));
    const auto of_allowed = at::log_softmax(allowed, 1);
    const auto of_model = at::log_softmax(logits.narrow(1, 0, 10).to(at::kFloat), 1);
    for (std::int64_t i = 0; i < 64; ++i) {
      const auto row = [&](const at::Tensor& x) { return x.narrow(0, i, 1); };
      if (i % 2 == 1) {
        EXPECT_TRUE(same_bytes(row(free.tokens), row(cut.tokens)));
        EXPECT_TRUE(same_bytes(row(free.logprobs), row(cut.logprobs)));
        EXPECT_TRUE(same_bytes(row(free.processed_logprobs), row(cut.processed_logprobs)));
        continue;
      }
      const auto token = cut.tokens[i].item<std::int64_t>();
      EXPECT_TRUE(token == 1 || token == 8 || token == 9) << token;
      EXPECT_NEAR(cut.processed_logprobs[i].item<float>(), of_allowed[i][token].item<float>(),
                  1e-4);
      EXPECT_NEAR(cut.logprobs[i].item<float>(), of_model[i][token].item<float>(), 1e-4);
      const auto free_token = free.tokens[i].item<std::int64_t>();
      if (free_token == 1 || free_token == 8 || free_token == 9) {
        EXPECT_EQ(token, free_token);
      }
    }
  }
}

TEST(Sampler, ARowsDrawDependsOnNoOtherRow) {
  at::manual_seed(2);
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const Mixture mixture(997);
    const auto logits = (at::randn({mixture.size(), 1000}) * 3).to(dtype);
    const auto all = sample(logits, 997, mixture.rows);
    for (std::int64_t i = 0; i < mixture.size(); ++i) {
      const auto one = sample(logits.narrow(0, i, 1).contiguous(), 997,
                              std::span(mixture.rows).subspan(static_cast<std::size_t>(i), 1));
      EXPECT_TRUE(same_bytes(one.tokens, all.tokens.narrow(0, i, 1))) << i;
      EXPECT_TRUE(same_bytes(one.logprobs, all.logprobs.narrow(0, i, 1))) << i;
      EXPECT_TRUE(same_bytes(one.processed_logprobs, all.processed_logprobs.narrow(0, i, 1))) << i;
    }
  }
}

// Steps 1 to 6 of sampler.h, in double precision and by sorting.
at::Tensor processed(const at::Tensor& logits, const SamplingRow& row, std::int64_t vocab) {
  auto l = logits.narrow(0, 0, vocab).to(at::kDouble).clone();
  const auto& p = *row.params;
  std::map<std::int64_t, int> counts;
  for (const auto token : row.prompt) counts.try_emplace(token, 0);
  for (const auto token : row.output) ++counts[token];
  auto* values = l.mutable_data_ptr<double>();
  for (const auto& [token, count] : counts) {
    auto& value = values[token];
    value = value > 0 ? value / p.repetition_penalty : value * p.repetition_penalty;
    value -= p.frequency_penalty * count + (count > 0 ? p.presence_penalty : 0);
  }
  for (const auto token : row.forbidden) values[token] = static_cast<double>(-kInfinity);
  if (p.greedy()) return at::log_softmax(l, 0);
  l = l / p.temperature;
  l.masked_fill_(at::softmax(l, 0) < p.min_p * at::softmax(l, 0).max(), -kInfinity);
  if (p.top_k > 0 && p.top_k < vocab)
    l.masked_fill_(l < std::get<0>(l.topk(p.top_k))[-1], -kInfinity);
  const auto [sorted, order] = l.sort(/*stable=*/true, 0, /*descending=*/true);
  const auto probability = at::softmax(sorted, 0);
  const auto before = probability.cumsum(0) - probability;
  if (p.top_p < 1)
    l.masked_fill_(at::zeros_like(l, at::kBool).scatter(0, order, before >= p.top_p), -kInfinity);
  return at::log_softmax(l, 0);
}

TEST(Sampler, ProcessedLogProbsAreThoseOfTheFormulas) {
  at::manual_seed(3);
  const Mixture mixture(997);
  const auto logits = at::randn({mixture.size(), 1000}) * 3;
  const auto sampled = sample(logits, 997, mixture.rows);
  for (std::int64_t i = 0; i < mixture.size(); ++i) {
    const auto expected = processed(logits[i], mixture.rows[static_cast<std::size_t>(i)], 997);
    const auto token = sampled.tokens[i].item<std::int64_t>();
    const auto of_token = expected[token].item<double>();
    EXPECT_TRUE(std::isfinite(of_token)) << i << ": token " << token << " is not kept";
    EXPECT_NEAR(sampled.processed_logprobs[i].item<float>(), of_token, 4e-6) << i;
    if (mixture.params[static_cast<std::size_t>(i)].greedy()) {
      EXPECT_EQ(token, expected.argmax().item<std::int64_t>()) << i;
    }
  }
}

TEST(Sampler, LogProbsAreTheBytesThatATrainerComputes) {
  at::manual_seed(4);
  const auto logits = (at::randn({6, 32000}) * 2).to(at::kBFloat16);
  const SamplingParams cold{.temperature = 0.6};
  const SamplingParams warm;
  auto rows = rows_of(warm, 6);
  rows[1].params = rows[4].params = &cold;
  const auto sampled = sample(logits, 32000, rows);
  const models::VocabularyRange range{.first = 0, .count = 32000};
  const auto of = [&](const at::Tensor& tokens, double temperature) {
    return models::log_probs_of(models::row_statistics(logits, tokens, range, temperature));
  };
  EXPECT_TRUE(same_bytes(sampled.logprobs, of(sampled.tokens, 1)));
  EXPECT_TRUE(same_bytes(sampled.processed_logprobs,
                         at::where(at::tensor({0, 1, 0, 0, 1, 0}) > 0, of(sampled.tokens, 0.6),
                                   of(sampled.tokens, 1))));
  rows[1].params = rows[4].params = &warm;
  const auto all_warm = sample(logits, 32000, rows);
  EXPECT_TRUE(same_bytes(all_warm.processed_logprobs, of(all_warm.tokens, 1)));
}

TEST(Sampler, EqualLogitsAreTakenByTheirIds) {
  const auto flat = at::zeros({100});
  for (const auto token : draws(flat, {.temperature = 0}, 3)) EXPECT_EQ(token, 0);
  for (const auto token : draws(flat, {.top_p = 0.05}, 1000)) EXPECT_LT(token, 5);
  const auto by_count = draws(flat, {.top_k = 3}, 1000);  // all equal the third largest
  EXPECT_GT(*std::max_element(by_count.begin(), by_count.end()), 90);
  auto two = at::zeros({100});
  two[70] = two[40] = 5;
  for (const auto token : draws(two, {.temperature = 0}, 3)) EXPECT_EQ(token, 40);
  const SamplingParams params{.temperature = 0, .logprobs = 4};
  const auto sampled = sample(two.unsqueeze(0), 100, rows_of(params, 1));
  EXPECT_EQ(integers(sampled.top_tokens), (std::vector<std::int64_t>{40, 70, 0, 1}));
  EXPECT_TRUE(same_bytes(sampled.top_logprobs[0].narrow(0, 0, 1), sampled.logprobs));
}

TEST(Sampler, WhatIsNotFiniteIsNeverDrawnWhereSomethingElseIs) {
  auto row = at::full({50}, -kInfinity);
  row[17] = 1;
  row[18] = 0;
  row[3] = std::numeric_limits<float>::quiet_NaN();
  for (const auto& params : {SamplingParams{}, SamplingParams{.top_k = 40, .top_p = 0.99},
                             SamplingParams{.temperature = 0}})
    for (const auto token : draws(row, params, 200))
      EXPECT_TRUE(token == 17 || token == 18) << token;
  const SamplingParams params;
  EXPECT_TRUE(std::isnan(sample(row.unsqueeze(0), 50, rows_of(params, 1)).logprobs.item<float>()));
  row[30] = row[20] = kInfinity;
  for (const auto token : draws(row, {}, 50)) EXPECT_EQ(token, 20);
  for (const auto token : draws(row, {.top_p = 0.9}, 50)) EXPECT_TRUE(token == 20 || token == 30);
  for (const auto token : draws(at::full({50}, -kInfinity), {.min_p = 0.1}, 2)) EXPECT_EQ(token, 0);
}

TEST(Sampler, PaddingAndForbiddenTokensAreNotDrawn) {
  auto logits = at::zeros({300, 16});
  logits.narrow(1, 10, 6).fill_(100);
  const SamplingParams params;
  auto rows = rows_of(params, 300);
  const std::vector<std::int64_t> forbidden{2, 3, 99};
  for (auto& row : rows) row.forbidden = forbidden;
  for (const auto token : integers(sample(logits, 10, rows).tokens))
    EXPECT_TRUE(token < 10 && token != 2 && token != 3) << token;
}

TEST(Sampler, TheHostsTokensAreTheGpus) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  at::manual_seed(5);
  for (const auto dtype : {at::kFloat, at::kBFloat16})
    for (const std::int64_t vocab : {5, 997, 32000, 151936})
      for (const double spread : {0.0, 0.3, 3.0}) {
        const Mixture mixture(vocab);
        auto logits = (at::randn({mixture.size(), (vocab + 7) / 8 * 8}) * spread).to(dtype);
        logits[3][1] = std::numeric_limits<float>::quiet_NaN();
        logits[5][vocab - 1] = kInfinity;
        logits[9].fill_(-kInfinity);
        const auto host = sample(logits, vocab, mixture.rows);
        const auto gpu = sample(logits.cuda(), vocab, mixture.rows);
        EXPECT_TRUE(same_bytes(host.tokens, gpu.tokens)) << vocab << " " << spread;
        for (std::int64_t i = 0; i < mixture.size(); ++i) {
          const auto& row = mixture.rows[static_cast<std::size_t>(i)];
          if (!row.params->truncates() && !row.params->penalizes() && row.forbidden.empty())
            continue;
          EXPECT_TRUE(same_bytes(host.processed_logprobs[i], gpu.processed_logprobs[i])) << i;
        }
      }
}

// The same tokens are kept, drawn and scored on both; the numbers of a kernel differ by roundings.
TEST(Sampler, TheHostsSamplingMasksAreTheGpus) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  at::manual_seed(8);
  const SamplingParams cuts[] = {
      {.top_p = 0.9, .return_sampling_mask = true},
      {.top_k = 20, .return_sampling_mask = true},
      {.temperature = 0.7,
       .top_k = 50,
       .top_p = 0.95,
       .return_entropy = true,
       .return_sampling_mask = true},
      {.min_p = 0.05, .return_sampling_mask = true},
      {.top_p = 0.5},  // cut, and nobody asks
      {},
  };
  for (const auto dtype : {at::kFloat, at::kBFloat16})
    for (const std::int64_t vocab : {5, 997, 151936}) {
      auto rows = rows_of(cuts[0], 48);
      for (std::size_t i = 0; i < rows.size(); ++i) rows[i].params = &cuts[i % std::size(cuts)];
      const auto logits = (at::randn({48, (vocab + 7) / 8 * 8}) * 3).to(dtype);
      const auto host = sample(logits, vocab, rows);
      const auto gpu = sample(logits.cuda(), vocab, rows);
      EXPECT_TRUE(same_bytes(host.tokens, gpu.tokens)) << vocab;
      EXPECT_EQ(host.sampling_mask.offsets, gpu.sampling_mask.offsets) << vocab;
      EXPECT_TRUE(same_bytes(host.sampling_mask.token_ids, gpu.sampling_mask.token_ids)) << vocab;
      EXPECT_GT(host.sampling_mask.token_ids.numel(), 48);
      EXPECT_TRUE(at::allclose(host.processed_logprobs, gpu.processed_logprobs.cpu(), 0, 1e-4));
      for (std::int64_t i = 2; i < 48; i += 6)  // the rows that ask for their entropy
        EXPECT_NEAR(host.entropies[i].item<float>(), gpu.entropies[i].item<float>(), 1e-4);
      ASSERT_TRUE(host.sampling_mask.offsets.back() == host.sampling_mask.token_ids.numel());
    }
}

// Few rows have more thread blocks each; and what is to be drawn may be on the GPU already.
TEST(Sampler, AGpusDrawsAreTheHostsForAnyNumberOfRows) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  at::manual_seed(6);
  const SamplingParams params;
  const SamplingParams greedy{.temperature = 0};
  const SamplingParams cold{.temperature = 0.6};
  for (const std::int64_t vocab : {1, 3, 997, 8193, 151936})
    for (const std::int64_t count : {1, 2, 7, 64, 300}) {
      auto rows = rows_of(params, count);
      for (std::size_t i = 0; i < rows.size(); ++i)
        rows[i].params = i % 3 == 1 ? &greedy : i % 3 == 2 ? &cold : &params;
      const auto logits = (at::randn({count, vocab + 5}) * 3).to(at::kBFloat16);
      const auto on_gpu = logits.cuda();
      const auto host = sample(logits, vocab, rows);
      const auto gpu = sample(on_gpu, vocab, rows);
      EXPECT_TRUE(same_bytes(gpu.tokens, host.tokens)) << vocab << ", rows " << count;
      auto draws = draws_of(rows, vocab);
      const auto bytes = static_cast<std::int64_t>(draws.plain.size() * sizeof(DrawRow));
      draws.plain_on_gpu = at::from_blob(draws.plain.data(), {bytes}, at::kByte).cuda();
      const auto uploaded = sample(on_gpu, vocab, rows, draws);
      EXPECT_TRUE(same_bytes(uploaded.tokens, host.tokens)) << vocab << ", rows " << count;
      EXPECT_TRUE(same_bytes(uploaded.logprobs, gpu.logprobs));
      EXPECT_TRUE(same_bytes(uploaded.processed_logprobs, gpu.processed_logprobs));
    }
}

}  // namespace sampler_test
}  // namespace ferry::rollout
