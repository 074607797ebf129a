#include "models/tensor_parallel/layers.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "models/kernels/product/linear.h"
#include "models/tensor_parallel/mappings.h"

namespace ferry::models {
namespace {

// Sums rows that exactly one rank has, and that are zeros elsewhere, as integers: a sum of floats
// would turn -0 into +0.
class OnlyOwnersRows : public torch::autograd::Function<OnlyOwnersRows> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& rows,
                            const ProcessGroup* group,
                            bool sequence_parallel) {
    context->saved_data["group"] = reinterpret_cast<std::int64_t>(group);
    context->saved_data["sequence_parallel"] = sequence_parallel;
    const auto bits = rows.contiguous().view(at::kInt);
    const auto sum = sequence_parallel ? group->reduce_scatter(bits) : group->all_reduce(bits);
    return sum.view(rows.scalar_type());
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto* const group =
        reinterpret_cast<const ProcessGroup*>(context->saved_data["group"].toInt());
    const bool sequence_parallel = context->saved_data["sequence_parallel"].toBool();
    return {sequence_parallel ? group->all_gather(gradients[0].contiguous()) : gradients[0],
            at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor TensorParallel::enter(const at::Tensor& x) const {
  return sequence_parallel ? gather_from_sequence_parallel_region(x, *group)
                           : copy_to_tensor_model_parallel_region(x, *group);
}

ColumnParallelLinear::ColumnParallelLinear(const TensorParallel& parallel,
                                           Parameters& parameters,
                                           const std::string& module)
    : parallel_(parallel),
      weight_(parameters.take(module + ".weight")),
      bias_(parameters.take_if(module + ".bias")) {}

at::Tensor ColumnParallelLinear::forward(const at::Tensor& x) const {
  return linear_slice(x, weight_, bias_, parallel_.alignment);
}

RowParallelLinear::RowParallelLinear(const TensorParallel& parallel,
                                     Parameters& parameters,
                                     const std::string& module)
    : parallel_(parallel),
      weight_(parameters.take(module + ".weight")),
      bias_(parameters.take_if(module + ".bias",
                               parallel.alignment == Alignment::kBitwise
                                   ? GradientOverTp::kPartial
                                   : parallel.between_layers())) {}

at::Tensor RowParallelLinear::forward(const at::Tensor& x) const {
  const auto& group = *parallel_.group;
  if (parallel_.alignment == Alignment::kBitwise) {
    // All of the bias on every rank: its slice goes with the rows of the weight.
    at::Tensor bias;
    if (bias_.defined()) {
      const auto mine = weight_.size(0);
      bias = bias_.narrow(0, group.rank() * mine, mine);
    }
    const auto whole = gather_from_tensor_model_parallel_region(x, group, /*replicated=*/false);
    const auto y = linear_slice(whole, weight_, bias, parallel_.alignment);
    return parallel_.sequence_parallel ? all_to_all_hidden_to_sequence(y, group)
                                       : gather_from_tensor_model_parallel_region(y, group);
  }
  const auto partial = linear(x, weight_, {}, parallel_.alignment);
  const auto y = parallel_.sequence_parallel
                     ? reduce_scatter_to_sequence_parallel_region(partial, group)
                     : reduce_from_tensor_model_parallel_region(partial, group);
  return bias_.defined() ? y + bias_ : y;
}

VocabParallelEmbedding::VocabParallelEmbedding(const TensorParallel& parallel,
                                               Parameters& parameters,
                                               const std::string& module)
    : parallel_(parallel), weight_(parameters.take(module + ".weight")) {}

at::Tensor VocabParallelEmbedding::forward(const at::Tensor& tokens) const {
  const auto& group = *parallel_.group;
  if (group.size() == 1) return at::embedding(weight_, tokens);
  const auto rows = weight_.size(0);
  const auto local = tokens - group.rank() * rows;
  const auto elsewhere = local.lt(0).logical_or(local.ge(rows));
  const auto mine = at::embedding(weight_, local.masked_fill(elsewhere, 0))
                        .masked_fill(elsewhere.unsqueeze(1), 0);
  return OnlyOwnersRows::apply(mine, &group, parallel_.sequence_parallel);
}

}  // namespace ferry::models
