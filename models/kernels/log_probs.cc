#include "models/kernels/log_probs.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <array>
#include <limits>

#include "distckpt/base/error.h"
#include "models/kernels/log_probs_cuda.h"

namespace ferry::models {
namespace {

void check_labels(const at::Tensor& logits, const at::Tensor& labels, VocabularyRange range) {
  require(logits.dim() == 2 && labels.dim() == 1 && labels.size(0) == logits.size(0) &&
              labels.scalar_type() == at::kLong && range.count >= 0 &&
              range.count <= logits.size(1),
          ErrorKind::kBug, "logits [{}, {}], {} labels, {} columns", logits.size(0),
          logits.size(-1), labels.numel(), range.count);
}

// Its exponential is 0 beside any logit, and so is every product with that, at any temperature; in
// float16, which ends at -65504, up to one of several hundred. Minus infinity would not do: its
// products with 0, and a range of nothing else, are not numbers.
double masked_logit(at::ScalarType dtype) {
  return dtype == at::kHalf ? static_cast<double>(std::numeric_limits<at::Half>::lowest()) : -1e20;
}

// [rows, range.count], fp32
at::Tensor scaled(const at::Tensor& logits, VocabularyRange range, double temperature) {
  const auto wide = logits.narrow(1, 0, range.count).to(at::kFloat);
  return temperature == 1 ? wide : wide / temperature;
}

// One row at a time, which stays in a thread's cache.
class HostRows {
 public:
  HostRows(const at::Tensor& logits, VocabularyRange range, double temperature, bool with_mean)
      : logits_(logits), range_(range), temperature_(temperature), with_mean_(with_mean) {}

  // [kRowStatistics, rows]
  at::Tensor statistics(const at::Tensor& labels) const {
    const auto rows = logits_.size(0);
    auto statistics = at::empty({kRowStatistics, rows}, logits_.options().dtype(at::kFloat));
    const auto own_labels = labels.contiguous();
    const auto* const label = own_labels.const_data_ptr<std::int64_t>();
    auto* const out = statistics.mutable_data_ptr<float>();
    at::parallel_for(0, rows, 1, [&](std::int64_t begin, std::int64_t end) {
      // The guards of the calling thread do not hold in other threads.
      const at::AutoDispatchBelowADInplaceOrView no_autograd;
      auto row = at::empty({1, range_.count}, statistics.options());
      auto log_probs = at::empty_like(row);
      for (auto i = begin; i < end; ++i) {
        const auto values = of_row(i, label[i] - range_.first, row, log_probs);
        for (std::int64_t k = 0; k < kRowStatistics; ++k)
          out[k * rows + i] = values[static_cast<std::size_t>(k)];
      }
    });
    return statistics;
  }

 private:
  using Values = std::array<float, kRowStatistics>;

  Values of_row(std::int64_t i, std::int64_t label, at::Tensor& row, at::Tensor& log_probs) const {
    row.copy_(logits_.narrow(0, i, 1).narrow(1, 0, range_.count));
    if (temperature_ != 1) row.div_(temperature_);
    at::_log_softmax_out(log_probs, row, -1, /*half_to_float=*/false);
    Values values{};
    values[kMaximum] = row.amax().item<float>();
    // log_softmax is (l - maximum) - log sum: where l is the maximum, - log sum.
    values[kLogSum] = -log_probs.amax().item<float>();
    values[kLabelLogit] = label >= 0 && label < range_.count
                              ? row.const_data_ptr<float>()[label]
                              : -std::numeric_limits<float>::infinity();
    values[kMeanBelow] = std::numeric_limits<float>::quiet_NaN();
    // Two copies of the row are summed: ATen shares out the sum of a single row among threads, in
    // another order.
    if (with_mean_)
      values[kMeanBelow] = log_probs.exp_()
                               .mul_(row.sub_(values[kMaximum]))
                               .expand({2, range_.count})
                               .sum(-1)[0]
                               .item<float>();
    return values;
  }

  const at::Tensor& logits_;
  VocabularyRange range_;
  double temperature_ = 1;
  bool with_mean_ = false;
};

}  // namespace

SamplingMask SamplingMask::rows(std::int64_t begin, std::int64_t count) const {
  if (!defined()) return {};
  const auto first = offsets.begin() + begin;
  SamplingMask some{.token_ids = token_ids.narrow(0, *first, *(first + count) - *first),
                    .offsets = {first, first + count + 1}};
  for (auto& offset : some.offsets) offset -= *first;
  return some;
}

void apply_sampling_mask(at::Tensor& logits, const SamplingMask& mask, VocabularyRange range) {
  if (!mask.defined()) return;
  require(logits.is_contiguous() &&
              static_cast<std::int64_t>(mask.offsets.size()) == logits.size(0) + 1 &&
              mask.offsets.back() == mask.token_ids.numel(),
          ErrorKind::kBug, "a sampling mask of {} rows and {} tokens for {} rows of logits",
          mask.offsets.size() - 1, mask.token_ids.numel(), logits.size(0));
  const auto rows =
      at::repeat_interleave(at::diff(at::tensor(mask.offsets, at::kLong))).to(logits.device());
  const auto columns = mask.token_ids - range.first;
  const auto here = at::nonzero(columns.ge(0).logical_and(columns.lt(range.count))).squeeze(1);
  const auto places = (rows * logits.size(1) + columns).index_select(0, here);
  auto flat = logits.view(-1);
  const auto kept = flat.index_select(0, places);
  flat.fill_(masked_logit(flat.scalar_type()));
  flat.index_copy_(0, places, kept);
}

ScoredRows score_rows(const at::Tensor& logits,
                      const at::Tensor& labels,
                      VocabularyRange range,
                      double temperature,
                      bool with_mean) {
  check_labels(logits, labels, range);
  if (logits.size(0) > 0 && range.count > 0 && logits.is_cuda())
    return score_rows_cuda(logits, labels, range, temperature);
  at::Tensor statistics;
  if (range.count > 0) {
    statistics = HostRows(logits, range, temperature, with_mean).statistics(labels);
  } else {  // a rank whose rows of the vocabulary are all padding
    statistics = at::full({kRowStatistics, logits.size(0)}, -std::numeric_limits<float>::infinity(),
                          logits.options().dtype(at::kFloat));
    statistics[kMeanBelow].zero_();
  }
  return {.statistics = statistics, .log_probs = log_probs_of(statistics)};
}

at::Tensor row_statistics(const at::Tensor& logits,
                          const at::Tensor& labels,
                          VocabularyRange range,
                          double temperature) {
  return score_rows(logits, labels, range, temperature, /*with_mean=*/true).statistics;
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
  check_labels(logits, labels, range);
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
