#include "models/finalize_model_grads.h"

#include <ATen/ops/zeros_like.h>

#include "models/distributed/world.h"

namespace ferry::models {

// The first stage adds up the gradients, and sends the sum back.
void sum_over_stages(const ProcessGroup& pp, at::Tensor& gradient, const std::vector<int>& stages) {
  if (pp.rank() != stages.front()) {
    pp.send(gradient, stages.front());
    pp.receive(gradient, stages.front());
    return;
  }
  auto sum = gradient.to(at::kFloat);
  auto other = at::zeros_like(gradient);
  for (std::size_t i = 1; i < stages.size(); ++i) {
    pp.receive(other, stages[i]);
    sum.add_(other);
  }
  gradient.copy_(sum);
  for (std::size_t i = 1; i < stages.size(); ++i) pp.send(gradient, stages[i]);
}

}  // namespace ferry::models
