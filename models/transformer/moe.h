// A mixture of experts. Tokens travel to the ranks that hold their experts and back by all-to-all
// over the expert parallel group (Megatron-Core token_dispatcher.py, MoEAlltoAllTokenDispatcher);
// the ranks of an expert tensor parallel group share out each expert and see each other's tokens.
//
// A token travels once to each rank that has experts of its choices. In kBitwise their results come
// back to the token's rank one by one and are summed there in the order of the choices: the sum
// does not depend on the ranks of the experts. In kFast a rank sums what it has. In generation rows
// are few, so that ranks exchange all of them rather than count who needs which.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "models/kernels/experts/experts.h"
#include "models/kernels/swiglu.h"
#include "models/transformer/mlp.h"
#include "models/transformer/router.h"

namespace ferry::models {

// The experts of one rank, each applied to its own rows.
class Experts {
 public:
  Experts(const ModelSetup& setup, Parameters& parameters, const std::string& prefix);

  // rows [rows, hidden], those of the rank's first expert first; ends [experts], int32: the end of
  // each expert's rows, where the rows are; nobody reads results of rows behind them -> [rows,
  // hidden]. On a GPU the host reads nothing. With expert tensor parallelism the result is this
  // rank's summand in kFast, and its columns, [rows, hidden/etp], in kBitwise.
  at::Tensor forward(const at::Tensor& rows, const at::Tensor& ends) const;
  // The same of the rows of x [tokens, hidden] in the order of `places`, those of all experts'
  // choices, for generation.
  at::Tensor generate(const at::Tensor& x, const ExpertOrder& places) const;

  // The sums over each token's choices of the same, for the choices [tokens, topk] of few tokens
  // without gradients: x [tokens, hidden], of_choices [tokens, topk] -> [tokens, hidden].
  bool takes_few(const at::Tensor& choices) const;
  at::Tensor forward_few(const at::Tensor& x,
                         const at::Tensor& choices,
                         const at::Tensor& of_choices) const;

 private:
  at::Tensor activated(const at::Tensor& gate_up) const;
  at::Tensor of_all_ranks(const at::Tensor& hidden) const;
  at::Tensor own_fc2_bias() const;
  bool may_use_kernels() const;
  QuickGeglu geglu_options() const;
  ExpertWeights weights() const;

  const ModelSetup& setup_;
  at::Tensor fc1_;  // [experts, 2 * ffn/etp, hidden]
  at::Tensor fc2_;  // [experts, hidden, ffn/etp]; kBitwise: [experts, hidden/etp, ffn]
  at::Tensor fc1_bias_, fc2_bias_;  // [experts, 2 * ffn/etp], [experts, hidden]; or undefined
};

class MoELayer : public FeedForward {
 public:
  MoELayer(const ModelSetup& setup, Parameters& parameters, const std::string& prefix);

  const at::Tensor& norm() const override { return norm_; }
  at::Tensor forward(const at::Tensor& normed, const RouterChoice& choice) const override;
  at::Tensor generate(const at::Tensor& normed,
                      const RouterChoice& choice,
                      const InferenceContext& context) const override;

  // True if generate() asks the host for nothing, given has_equal_rows(): all ranks see all rows of
  // those that share experts, and compute their own experts' part of the results.
  static bool generates_on_device(const ParallelState& mesh);
  // True if ranks gather these rows from each other then: more ranks share the experts than have
  // the same rows. Each gives a share, so that rows are a multiple of the tensor parallel ranks.
  static bool gathers_rows(const ParallelState& mesh);

 private:
  using Route = Routing (TopKRouter::*)(const at::Tensor& x, const RouterChoice& choice) const;
  at::Tensor dispatch(const at::Tensor& normed, const RouterChoice& choice, Route route) const;
  // Calls `meanwhile` once, where rows travel to other ranks while they do.
  at::Tensor compute_routed(const at::Tensor& x,
                            const Routing& routing,
                            const std::function<void()>& meanwhile) const;
  at::Tensor compute_own_experts(const at::Tensor& rows, const RouterChoice& choice) const;
  // The output of the shared expert for all rows; undefined without one.
  at::Tensor shared(const at::Tensor& normed) const;

  const ModelSetup& setup_;
  at::Tensor norm_;
  TopKRouter router_;
  Experts experts_;
  std::optional<MLP> shared_;
  at::Tensor shared_gate_;  // [1, hidden]
};

}  // namespace ferry::models
