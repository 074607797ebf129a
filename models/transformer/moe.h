// A mixture of experts. Tokens travel to the ranks that hold their experts and back by all-to-all
// over the expert parallel group (Megatron-Core token_dispatcher.py, MoEAlltoAllTokenDispatcher);
// the ranks of an expert tensor parallel group share out each expert and see each other's tokens.
//
// Results of the experts come back to the token's rank unreduced, one row for each of its choices,
// and are summed there in the order of the choices: the sum does not depend on the ranks of the
// experts.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "models/transformer/mlp.h"
#include "models/transformer/router.h"

namespace ferry::models {

// The experts of one rank, each applied to its own rows.
class Experts {
 public:
  Experts(const ModelSetup& setup, Parameters& parameters, const std::string& prefix);

  // rows [rows, hidden], those of the rank's first expert first; counts: the rows of each expert ->
  // [rows, hidden]. With expert tensor parallelism the result is this rank's summand in kFast, and
  // its columns, [rows, hidden/etp], in kBitwise.
  at::Tensor forward(const at::Tensor& rows, const std::vector<std::int64_t>& counts) const;

 private:
  const ModelSetup& setup_;
  at::Tensor fc1_;  // [experts, 2 * ffn/etp, hidden]
  at::Tensor fc2_;  // [experts, hidden, ffn/etp]; kBitwise: [experts, hidden/etp, ffn]
};

class MoELayer : public FeedForward {
 public:
  MoELayer(const ModelSetup& setup, Parameters& parameters, const std::string& prefix);

  const at::Tensor& norm() const override { return norm_; }
  at::Tensor forward(const at::Tensor& normed, const RouterChoice& choice) const override;

 private:
  at::Tensor route_and_compute(const at::Tensor& x, const RouterChoice& choice) const;

  const ModelSetup& setup_;
  at::Tensor norm_;
  TopKRouter router_;
  Experts experts_;
  std::optional<MLP> shared_;
  at::Tensor shared_gate_;  // [1, hidden]
};

}  // namespace ferry::models
