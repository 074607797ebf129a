#include "models/kernels/log_probs.h"

#include <ATen/ATen.h>

#include <limits>

#include "distckpt/error.h"
#include "models/kernels/log_probs_cuda.h"

namespace ferry::models {
namespace {

void check(const at::Tensor& logits, const at::Tensor& labels, VocabularyRange range) {
  require(logits.dim() == 2 && labels.dim() == 1 && labels.size(0) == logits.size(0) &&
              labels.scalar_type() == at::kLong && range.count >= 0 &&
              range.count <= logits.size(1),
          ErrorKind::kBug, "logits [{}, {}], {} labels, {} columns", logits.size(0),
          logits.size(-1), labels.numel(), range.count);
}

// [rows, range.count], fp32
at::Tensor scaled(const at::Tensor& logits, VocabularyRange range, double temperature) {
  const auto wide = logits.narrow(1, 0, range.count).to(at::kFloat);
  return temperature == 1 ? wide : wide / temperature;
}

at::Tensor statistics_without_kernel(const at::Tensor& logits,
                                     const at::Tensor& labels,
                                     VocabularyRange range,
                                     double temperature) {
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  auto statistics =
      at::full({kRowStatistics, logits.size(0)}, kNothing, logits.options().dtype(at::kFloat));
  if (logits.size(0) == 0) return statistics;
  if (range.count == 0) {  // a rank whose rows of the vocabulary are all padding
    statistics[kMeanBelow].zero_();
    return statistics;
  }
  const auto l = scaled(logits, range, temperature);
  const auto maximum = l.amax(-1, /*keepdim=*/true);
  const auto below = l - maximum;
  // log_softmax is (l - maximum) - log sum: where l is the maximum, - log sum.
  const auto log_sum = -at::log_softmax(l, -1).amax(-1);
  statistics[kMaximum].copy_(maximum.squeeze(-1));
  statistics[kLogSum].copy_(log_sum);
  statistics[kMeanBelow].copy_(((below - log_sum.unsqueeze(-1)).exp() * below).sum(-1));
  const auto local = labels - range.first;
  const auto elsewhere = local.lt(0).logical_or(local.ge(range.count));
  const auto label = l.gather(1, local.masked_fill(elsewhere, 0).unsqueeze(1)).squeeze(1);
  statistics[kLabelLogit].copy_(label.masked_fill(elsewhere, kNothing));
  return statistics;
}

}  // namespace

ScoredRows score_rows(const at::Tensor& logits,
                      const at::Tensor& labels,
                      VocabularyRange range,
                      double temperature) {
  check(logits, labels, range);
  if (logits.is_cuda() && logits.size(0) > 0 && range.count > 0)
    return score_rows_cuda(logits, labels, range, temperature);
  const auto statistics = statistics_without_kernel(logits, labels, range, temperature);
  return {.statistics = statistics, .log_probs = log_probs_of(statistics)};
}

at::Tensor row_statistics(const at::Tensor& logits,
                          const at::Tensor& labels,
                          VocabularyRange range,
                          double temperature) {
  return score_rows(logits, labels, range, temperature).statistics;
}

at::Tensor combine_row_statistics(const at::Tensor& of_ranges) {
  const auto maxima = of_ranges.select(1, kMaximum);  // [ranges, rows]
  const auto maximum = maxima.amax(0);
  const auto below = maxima - maximum;
  const auto sums = (below + of_ranges.select(1, kLogSum)).exp();
  const auto sum = sums.sum(0);
  // A range without columns has no maximum, and no share either.
  const auto mean = at::where(sums > 0, sums * (of_ranges.select(1, kMeanBelow) + below), 0.0);
  return at::stack(
      {maximum, sum.log(), mean.sum(0) / sum, of_ranges.select(1, kLabelLogit).amax(0)});
}

at::Tensor log_probs_of(const at::Tensor& statistics) {
  return (statistics[kLabelLogit] - statistics[kMaximum]) - statistics[kLogSum];
}

at::Tensor entropies_of(const at::Tensor& statistics) {
  return statistics[kLogSum] - statistics[kMeanBelow];
}

void logits_to_gradient(at::Tensor& logits,
                        const at::Tensor& statistics,
                        const at::Tensor& labels,
                        const at::Tensor& of_log_prob,
                        const at::Tensor& of_entropy,
                        VocabularyRange range,
                        double temperature) {
  check(logits, labels, range);
  if (logits.numel() == 0) return;
  if (logits.is_cuda()) {
    logits_to_gradient_cuda(logits, statistics, labels, of_log_prob, of_entropy, range,
                            temperature);
    return;
  }
  const auto below = scaled(logits, range, temperature) - statistics[kMaximum].unsqueeze(1);
  const auto p = (below - statistics[kLogSum].unsqueeze(1)).exp();
  auto gradient = p * -of_log_prob.unsqueeze(1);
  const auto local = labels - range.first;
  const auto here = local.ge(0).logical_and(local.lt(range.count));
  gradient.scatter_add_(1, local.masked_fill(here.logical_not(), 0).unsqueeze(1),
                        (of_log_prob * here).unsqueeze(1));
  if (of_entropy.defined())  // d entropy / d l = p (mean - l)
    gradient += of_entropy.unsqueeze(1) * p * (statistics[kMeanBelow].unsqueeze(1) - below);
  logits.narrow(1, 0, range.count).copy_(gradient / temperature);
  logits.narrow(1, range.count, logits.size(1) - range.count).zero_();
}

}  // namespace ferry::models
