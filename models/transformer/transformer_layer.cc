#include "models/transformer/transformer_layer.h"

#include <ATen/ops/cat.h>

#include "distckpt/base/error.h"
#include "models/tensor_parallel/mappings.h"

namespace ferry::models {
namespace {

// The norm of what a module gives, which the layer holds or the module's projection.
at::Tensor take_post_norm(const ModelSetup& setup,
                          Parameters& parameters,
                          const std::string& of_layer,
                          const std::string& of_linear) {
  const auto between = setup.tensor_parallel.between_layers();
  const auto norm = parameters.take_if(of_layer, between);
  return norm.defined() ? norm : parameters.take_if(of_linear, between);
}

}  // namespace

TransformerLayer::TransformerLayer(const ModelSetup& setup,
                                   Parameters& parameters,
                                   const std::string& prefix,
                                   std::int64_t layer,
                                   bool moe)
    : prefix_(prefix),
      layer_(layer),
      epsilon_(setup.config.layernorm_epsilon),
      rounding_(setup.config.norm_rounding()),
      residual_multiplier_(setup.config.residual_multiplier),
      feed_forward_recomputed_(
          setup.recompute.selects(moe ? &Recompute::Modules::moe : &Recompute::Modules::mlp)),
      attention_(make_attention(setup, parameters, prefix, layer)),
      post_attention_norm_(
          take_post_norm(setup,
                         parameters,
                         prefix + "post_self_attn_layernorm.weight",
                         prefix + "self_attention.linear_proj.post_layernorm.weight")),
      feed_forward_(make_feed_forward(setup, parameters, prefix, moe)),
      post_mlp_norm_(take_post_norm(setup,
                                    parameters,
                                    prefix + "post_mlp_layernorm.weight",
                                    prefix + "mlp.linear_fc2.post_layernorm.weight")) {}

at::Tensor TransformerLayer::pre_normed(ResidualStream& stream, const at::Tensor& weight) const {
  if (weight.defined()) return add_and_norm(stream, weight, epsilon_, rounding_);
  stream = {.sum = stream.total()};
  return stream.sum;
}

at::Tensor TransformerLayer::post_normed(const at::Tensor& x, const at::Tensor& weight) const {
  const auto normed = weight.defined() ? rms_norm(x, weight, epsilon_, rounding_) : x;
  return residual_multiplier_ == 1 ? normed : normed * residual_multiplier_;
}

ResidualStream TransformerLayer::forward(ResidualStream stream, const LayerContext& context) const {
  const auto& observe = context.observe;
  const auto attended = attention_->forward(pre_normed(stream, attention_->norm()), context);
  stream.pending = post_normed(attended, post_attention_norm_);
  const auto normed = pre_normed(stream, feed_forward_->norm());
  const auto choice = context.routes.of(layer_);
  const auto feed_forward = [network = feed_forward_,
                             choice](const std::vector<at::Tensor>& inputs) {
    return std::vector{network->forward(inputs[0], choice)};
  };
  const auto fed = context.inference != nullptr
                       ? feed_forward_->generate(normed, choice, *context.inference)
                   : feed_forward_recomputed_ ? recompute(feed_forward, {normed})[0]
                                              : feed_forward_->forward(normed, choice);
  stream.pending = post_normed(fed, post_mlp_norm_);
  if (observe) {
    observe(prefix_ + "self_attention", attended);
    observe(prefix_ + "mlp", fed);
    observe(prefix_.substr(0, prefix_.size() - 1), stream.total());
  }
  return stream;
}

MultiTokenPredictionLayer::MultiTokenPredictionLayer(const ModelSetup& setup,
                                                     Parameters& parameters,
                                                     std::int64_t index)
    : setup_(setup),
      enorm_(parameters.take(fmt::format("mtp.layers.{}.enorm.weight", index),
                             setup.tensor_parallel.between_layers())),
      hnorm_(parameters.take(fmt::format("mtp.layers.{}.hnorm.weight", index),
                             setup.tensor_parallel.between_layers())),
      eh_proj_(setup.tensor_parallel, parameters, fmt::format("mtp.layers.{}.eh_proj", index)),
      layer_(setup,
             parameters,
             fmt::format("mtp.layers.{}.transformer_layer.", index),
             setup.config.num_layers + index,
             setup.config.num_moe_experts > 0),
      final_norm_(parameters.take(fmt::format("mtp.layers.{}.final_layernorm.weight", index),
                                  setup.tensor_parallel.between_layers())) {}

at::Tensor MultiTokenPredictionLayer::forward(const at::Tensor& hidden,
                                              const at::Tensor& next_embedding,
                                              const LayerContext& context) const {
  const auto& parallel = setup_.tensor_parallel;
  const auto epsilon = setup_.config.layernorm_epsilon;
  const auto rounding = setup_.config.norm_rounding();
  const auto both = at::cat({rms_norm(next_embedding, enorm_, epsilon, rounding),
                             rms_norm(hidden, hnorm_, epsilon, rounding)},
                            -1);
  const auto projected = eh_proj_.forward(parallel.enter(both));
  const auto x = parallel.sequence_parallel
                     ? all_to_all_hidden_to_sequence(projected, *parallel.group)
                     : gather_from_tensor_model_parallel_region(projected, *parallel.group);
  auto stream = layer_.forward({.sum = x}, context);
  return add_and_norm(stream, final_norm_, epsilon, rounding);
}

}  // namespace ferry::models
