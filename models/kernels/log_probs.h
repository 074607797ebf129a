// The log-probability of a token and the entropy, which are all that losses read of a row of
// logits. A row is reduced to four numbers, from which the gradient is written over the logits
// themselves, so that no second tensor of their size exists.
//
// Let l be the row in fp32, over the temperature: log_prob(t) = (l[t] - max l) - log sum exp(l
// - max l), entropy = log sum exp(l - max l) - sum p (l - max l). The sums of a row depend on
// nothing but the row. On the host log_prob has the bytes of torch.log_softmax; on a GPU it has
// them for vocabularies of more than 12,288 entries, a multiple of four, where torch's sums depend
// on the row alone, too.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace ferry::models {

// The part of the vocabulary that a tensor of logits has: column c is token first + c. Columns from
// `count` on are padding.
struct VocabularyRange {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

// The tokens that each row is a distribution over: all others have probability 0 (vLLM's
// SamplingMask, what top_k, top_p and min_p left of the vocabulary; DeepSeek-V3.2,
// arXiv:2512.02556, 3.1, "Keep Sampling Mask").
struct SamplingMask {
  at::Tensor token_ids{};               // [ids], int64, row after row
  std::vector<std::int64_t> offsets{};  // [rows + 1], the begin of each row's; empty: no mask

  bool defined() const { return !offsets.empty(); }
  SamplingMask rows(std::int64_t begin, std::int64_t count) const;
};

// Overwrites the logits of masked tokens with a value so far below all others that it changes no
// bit of a row's statistics or gradient. logits [rows, >= range.count], contiguous; the mask's
// tokens are of the whole vocabulary, and on the same device.
void apply_sampling_mask(at::Tensor& logits, const SamplingMask& mask, VocabularyRange range);

// Rows of the statistics [4, rows], fp32.
enum RowStatistic : std::int64_t {
  kMaximum,     // of the row
  kLogSum,      // log sum exp(l - maximum)
  kMeanBelow,   // sum p (l - maximum)
  kLabelLogit,  // of the row's label; -inf if it lies outside the range
  kRowStatistics
};

struct ScoredRows {
  at::Tensor statistics{};  // [4, rows]
  at::Tensor log_probs{};   // [rows]: log_probs_of(statistics), on a GPU out of the same kernel
};
// logits [rows, >= range.count], bf16 or fp32; labels [rows], int64. Entropies need the mean
// (`with_mean`), which costs extra time on the host; without it, kMeanBelow is NaN there.
ScoredRows score_rows(const at::Tensor& logits,
                      const at::Tensor& labels,
                      VocabularyRange range,
                      double temperature,
                      bool with_mean = false);

// The statistics [4, rows], with the mean.
at::Tensor row_statistics(const at::Tensor& logits,
                          const at::Tensor& labels,
                          VocabularyRange range,
                          double temperature);

// Combines the statistics of ranges that make up the vocabulary, [ranges, 4, rows] -> those of
// whole rows, [4, rows].
at::Tensor combine_row_statistics(const at::Tensor& of_ranges);

at::Tensor log_probs_of(const at::Tensor& statistics);  // [4, rows] -> [rows]
at::Tensor entropies_of(const at::Tensor& statistics);

// Overwrites the logits with the gradient of sum_rows(of_log_prob * log_prob + of_entropy *
// entropy). `of_log_prob`, `of_entropy` [rows], fp32; of_entropy may be undefined. Padding gets
// zeros.
void logits_to_gradient(at::Tensor& logits,
                        const at::Tensor& statistics,
                        const at::Tensor& labels,
                        const at::Tensor& of_log_prob,
                        const at::Tensor& of_entropy,
                        VocabularyRange range,
                        double temperature);

}  // namespace ferry::models
