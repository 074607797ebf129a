// The result of a loss. Losses and their metrics are parts of the whole batch's: those of all
// micro-batches of all ranks add up.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

namespace ferry::trainer {

using LossMetrics = std::map<std::string, at::Tensor>;

struct LossOutput {
  at::Tensor loss{};  // a scalar, this rank's share, the same on tensor parallel ranks; undefined
                      // where nothing is to be propagated
  LossMetrics metrics{};
};

}  // namespace ferry::trainer
