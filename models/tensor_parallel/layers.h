// Linear layers and embeddings that tensor parallel ranks share (Megatron-Core
// tensor_parallel/layers.py). Rows are tokens. With sequence parallelism a rank has its part of the
// tokens between the layers, and all tokens inside a layer.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "models/distributed/parallel_state.h"
#include "models/spec/alignment.h"
#include "models/tensor_parallel/parameters.h"

namespace ferry::models {

// The work of the ranks of a tensor parallel group in a model.
struct TensorParallel {
  const ProcessGroup* group = nullptr;
  bool sequence_parallel = false;
  Alignment alignment = Alignment::kFast;

  // x [tokens, channels], as it is between the layers -> all tokens, on every rank. The backward
  // sums the ranks' gradients, and gives this rank's tokens.
  at::Tensor enter(const at::Tensor& x) const;

  // The GradientOverTp of parameters that every rank holds whole and applies to tokens between the
  // layers.
  GradientOverTp between_layers() const {
    return sequence_parallel ? GradientOverTp::kPartial : GradientOverTp::kWhole;
  }
};

// y = x w^T + b. Each rank holds some rows of the weight, and so computes some columns of y.
class ColumnParallelLinear {
 public:
  ColumnParallelLinear() = default;
  // Takes `module`.weight and, if the layout has it, `module`.bias.
  ColumnParallelLinear(const TensorParallel& parallel,
                       Parameters& parameters,
                       const std::string& module);

  // x [tokens, in], as enter() gives it -> [tokens, out/tp].
  at::Tensor forward(const at::Tensor& x) const;
  const at::Tensor& weight() const { return weight_; }

 private:
  TensorParallel parallel_;
  at::Tensor weight_, bias_;
};

// y = x w^T + b, where each rank holds some of the channels of x. kFast: each rank multiplies its
// columns of the weight, and the ranks' products are summed. kBitwise: the ranks gather x and share
// out the rows of the weight, so that no sum crosses ranks.
class RowParallelLinear {
 public:
  RowParallelLinear() = default;
  RowParallelLinear(const TensorParallel& parallel,
                    Parameters& parameters,
                    const std::string& module);

  // x [tokens, in/tp] -> [tokens, out], as it is between the layers.
  at::Tensor forward(const at::Tensor& x) const;

 private:
  TensorParallel parallel_;
  at::Tensor weight_, bias_;
};

// The embedding of tokens. Each rank holds some rows of the table.
class VocabParallelEmbedding {
 public:
  VocabParallelEmbedding() = default;
  VocabParallelEmbedding(const TensorParallel& parallel,
                         Parameters& parameters,
                         const std::string& module);

  // tokens [tokens] -> [tokens, hidden], as it is between the layers.
  at::Tensor forward(const at::Tensor& tokens) const;
  const at::Tensor& weight() const { return weight_; }

 private:
  TensorParallel parallel_;
  at::Tensor weight_;
};

}  // namespace ferry::models
