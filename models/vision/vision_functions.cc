#include "models/vision/vision_functions.h"

#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/conv3d.h>
#include <ATen/ops/softmax.h>
#include <torch/csrc/autograd/custom_function.h>

#include "models/kernels/attention/deterministic_algorithms.h"
#include "models/kernels/product/float_product.h"

namespace ferry::models {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A convolution forward, whose patches do not overlap: backward it is a product.
class PatchEmbed : public torch::autograd::Function<PatchEmbed> {
 public:
  static at::Tensor forward(AutogradContext* context,
                            const at::Tensor& pixels,
                            const at::Tensor& weight,
                            const at::Tensor& bias,
                            bool bitwise) {
    context->save_for_backward({pixels});
    context->saved_data["bitwise"] = bitwise;
    context->saved_data["shape"] = weight.sizes().vec();
    return at::conv3d(pixels, weight, bias, weight.sizes().slice(2)).flatten(1);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto pixels = context->get_saved_variables()[0].flatten(1);
    const auto alignment =
        context->saved_data["bitwise"].toBool() ? Alignment::kBitwise : Alignment::kFast;
    const auto of_weight = models::matmul(grads[0].t(), pixels, alignment)
                               .view(context->saved_data["shape"].toIntVector());
    return {at::Tensor(), of_weight, grads[0].sum(0), at::Tensor()};
  }
};

class FlashOfFrame : public torch::autograd::Function<FlashOfFrame> {
 public:
  static at::Tensor forward(AutogradContext* context,
                            const at::Tensor& query,
                            const at::Tensor& key,
                            const at::Tensor& value,
                            double scale) {
    const auto result = at::_scaled_dot_product_flash_attention(query, key, value,
                                                                /*dropout_p=*/0.0,
                                                                /*is_causal=*/false,
                                                                /*return_debug_mask=*/false, scale);
    const auto& [out, log_sum, query_ends, key_ends, queries, keys, seed, offset, mask] = result;
    context->save_for_backward(
        {query, key, value, out, log_sum, query_ends, key_ends, seed, offset});
    context->saved_data["queries"] = queries.expect_int();
    context->saved_data["keys"] = keys.expect_int();
    context->saved_data["scale"] = scale;
    return out.transpose(1, 2);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const DeterministicAlgorithms deterministic(true);
    const auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_backward(
        grads[0].transpose(1, 2), saved[0], saved[1], saved[2], saved[3], saved[4], saved[5],
        saved[6], context->saved_data["queries"].toInt(), context->saved_data["keys"].toInt(),
        /*dropout_p=*/0.0, /*is_causal=*/false, saved[7], saved[8],
        context->saved_data["scale"].toDouble());
    return {of_query, of_key, of_value, at::Tensor()};
  }
};

}  // namespace

at::Tensor patch_embed(const at::Tensor& pixels,
                       const at::Tensor& weight,
                       const at::Tensor& bias,
                       Alignment alignment) {
  return PatchEmbed::apply(pixels, weight, bias, alignment == Alignment::kBitwise);
}

at::Tensor eager_attention_of_frame(const at::Tensor& query,
                                    const at::Tensor& key,
                                    const at::Tensor& value,
                                    double scale,
                                    Alignment alignment) {
  const auto scores = models::matmul(query, key.transpose(2, 3), alignment) * scale;
  const auto weights = at::softmax(scores, -1, at::kFloat).to(query.scalar_type());
  return models::matmul(weights, value, alignment).transpose(1, 2);
}

at::Tensor flash_attention_of_frame(const at::Tensor& query,
                                    const at::Tensor& key,
                                    const at::Tensor& value,
                                    double scale) {
  return FlashOfFrame::apply(query, key, value, scale);
}

}  // namespace ferry::models
