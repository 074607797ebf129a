#include "models/transformer/mlp.h"

#include "models/transformer/moe.h"

namespace ferry::models {
namespace {

class DenseMLP : public FeedForward {
 public:
  DenseMLP(const ModelSetup& setup, Parameters& parameters, const std::string& prefix)
      : norm_(parameters.take_if(prefix + "mlp.linear_fc1.layer_norm_weight",
                                 setup.tensor_parallel.between_layers())),
        mlp_(setup, parameters, prefix + "mlp.") {}

  const at::Tensor& norm() const override { return norm_; }
  at::Tensor forward(const at::Tensor& normed, const RouterChoice&) const override {
    return mlp_.forward(normed);
  }

 private:
  at::Tensor norm_;
  MLP mlp_;
};

}  // namespace

MLP::MLP(const ModelSetup& setup, Parameters& parameters, const std::string& module)
    : parallel_(setup.tensor_parallel),
      activation_(gated_activation(setup.config.activation)),
      fc1_(parallel_, parameters, module + "linear_fc1"),
      fc2_(parallel_, parameters, module + "linear_fc2") {}

at::Tensor MLP::forward(const at::Tensor& x) const {
  return fc2_.forward(activation_(fc1_.forward(parallel_.enter(x))));
}

std::unique_ptr<FeedForward> make_feed_forward(const ModelSetup& setup,
                                               Parameters& parameters,
                                               const std::string& prefix,
                                               bool moe) {
  if (moe) return std::make_unique<MoELayer>(setup, parameters, prefix);
  return std::make_unique<DenseMLP>(setup, parameters, prefix);
}

}  // namespace ferry::models
