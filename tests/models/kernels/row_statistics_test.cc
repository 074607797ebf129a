// Statistics of a row of logits on the host depend on the row alone.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "models/kernels/log_probs.h"

namespace ferry::models {
namespace row_statistics_test {

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() &&
         at::equal(a.contiguous().view(at::kByte), b.contiguous().view(at::kByte));
}

struct Logits {
  explicit Logits(at::ScalarType dtype) : values((at::randn({17, 32008}) * 3).to(dtype)) {}

  at::Tensor values;
  at::Tensor labels = at::randint(0, 32001, {17}, at::kLong);
  VocabularyRange range{.first = 0, .count = 32001};
};

TEST(RowStatistics, LogProbsHaveTheBytesOfLogSoftmax) {
  at::manual_seed(1);
  for (const auto dtype : {at::kBFloat16, at::kFloat}) {
    const Logits logits(dtype);
    for (const double temperature : {1.0, 0.7}) {
      const auto wide = logits.values.narrow(1, 0, 32001).to(at::kFloat) / temperature;
      const auto expected =
          at::log_softmax(wide, -1).gather(1, logits.labels.unsqueeze(1)).squeeze(1);
      const auto got = score_rows(logits.values, logits.labels, logits.range, temperature);
      EXPECT_TRUE(same_bytes(got.log_probs, expected));
      const auto statistics =
          row_statistics(logits.values, logits.labels, logits.range, temperature);
      EXPECT_TRUE(same_bytes(log_probs_of(statistics), expected));
      const auto p = at::softmax(wide.to(at::kDouble), -1);
      EXPECT_TRUE(at::allclose(entropies_of(statistics).to(at::kDouble), -(p * p.log()).sum(-1),
                               1e-5, 1e-5));
    }
  }
}

TEST(RowStatistics, ARowAloneHasTheBytesThatItHasAmongOthers) {
  at::manual_seed(2);
  const auto threads = at::get_num_threads();
  const Logits logits(at::kBFloat16);
  const auto all = row_statistics(logits.values, logits.labels, logits.range, 0.7);
  for (const int count : {1, 2, 3}) {
    at::set_num_threads(count);
    for (const std::int64_t rows : {1, 2, 5})
      EXPECT_TRUE(same_bytes(row_statistics(logits.values.narrow(0, 4, rows),
                                            logits.labels.narrow(0, 4, rows), logits.range, 0.7),
                             all.narrow(1, 4, rows)))
          << rows << " rows, " << count << " threads";
  }
  at::set_num_threads(threads);
}

}  // namespace row_statistics_test
}  // namespace ferry::models
