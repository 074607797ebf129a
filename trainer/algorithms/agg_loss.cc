#include "trainer/algorithms/agg_loss.h"

#include <ATen/ATen.h>

#include "distckpt/base/error.h"
#include "trainer/algorithms/masked.h"

namespace ferry::trainer {
namespace {

double checked(double count, std::string_view name) {
  require(count > 0, ErrorKind::kUsage, "loss: {} is {}, but the loss is divided by it", name,
          count);
  return count;
}

double sequences(const GlobalBatchInfo& info) {
  return checked(static_cast<double>(info.global_batch_size), "global_batch_size");
}

}  // namespace

at::Tensor agg_loss(const at::Tensor& loss_mat,
                    const at::Tensor& loss_mask,
                    LossAggMode mode,
                    const GlobalBatchInfo& info) {
  switch (mode) {
    case LossAggMode::kTokenMean:
      return masked_sum(loss_mat, loss_mask) /
             checked(static_cast<double>(info.batch_num_tokens), "batch_num_tokens");
    case LossAggMode::kTokenSum:
      return masked_sum(loss_mat, loss_mask);
    case LossAggMode::kSeqMeanTokenSum:
      return masked_sum(loss_mat, loss_mask, -1).sum() / sequences(info);
    case LossAggMode::kSeqMeanTokenMean:
      return masked_mean(loss_mat, loss_mask, -1).sum() / sequences(info);
    case LossAggMode::kSeqMeanTokenSumNorm:
      return masked_sum(loss_mat, loss_mask, -1).sum() / sequences(info) /
             checked(info.loss_scale_factor, "loss_scale_factor");
  }
  fail(ErrorKind::kBug, "loss_agg_mode: no such mode");
}

}  // namespace ferry::trainer
