// One element's step of Adam, the same on the host and on a GPU: the operations and their order are
// those of torch.optim.AdamW (torch 2.11, _single_tensor_adam), each rounded to fp32. Compiled
// without contraction to fused multiply-adds, both give the same bits.
#pragma once

namespace ferry::trainer {

// Factors that all elements of a step share.
struct AdamFactors {
  float grad_scale = 1;  // of the gradient, before anything else: clipping and the loss scale
  float decay = 1;       // 1 - lr * weight_decay, of the parameter
  float l2 = 0;          // weight_decay, added to the gradient times the parameter
  float one_minus_beta1 = 0;
  float beta2 = 0;
  float one_minus_beta2 = 0;
  float step_size = 0;         // lr / (1 - beta1^step)
  float root_correction2 = 1;  // sqrt(1 - beta2^step)
  float eps = 0;
};

struct AdamElement {
  float param = 0;
  float exp_avg = 0;
  float exp_avg_sq = 0;
};

template <typename Root>  // float -> float, correctly rounded
constexpr AdamElement adam_element(
    const AdamElement& old, float raw_grad, bool decays, const AdamFactors& f, const Root& root) {
  const float scaled = raw_grad * f.grad_scale;
  const float grad = decays ? scaled + f.l2 * old.param : scaled;
  const float param = decays ? old.param * f.decay : old.param;
  const float exp_avg = old.exp_avg + f.one_minus_beta1 * (grad - old.exp_avg);
  const float exp_avg_sq = old.exp_avg_sq * f.beta2 + f.one_minus_beta2 * grad * grad;
  const float denominator = root(exp_avg_sq) / f.root_correction2 + f.eps;
  return {param - f.step_size * exp_avg / denominator, exp_avg, exp_avg_sq};
}

}  // namespace ferry::trainer
