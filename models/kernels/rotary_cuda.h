// Rotary position embeddings on a GPU: the angles in one kernel; and in one kernel, with Hugging
// Face's three roundings, x * cos, rotate_half(x) * sin, and their sum.
#pragma once

#include <ATen/core/Tensor.h>

namespace ferry::models {

// positions [tokens], int64, and inv_freq [dim/2], fp32 -> [2, tokens, 1, dim], of `dtype`: cosines
// and sines of their products, times `scaling`.
at::Tensor rotary_angles_cuda(const at::Tensor& positions,
                              const at::Tensor& inv_freq,
                              double scaling,
                              at::ScalarType dtype);

// x [tokens, heads, dim] or [tokens, groups, heads of a group, dim], with any strides but that of
// dim; cos and sin [tokens, 1, dim] of x's type -> [tokens, heads, dim], contiguous. With
// `interleaved` channels 2i and 2i + 1 turn together and come out as halves. Not differentiable.
at::Tensor rotary_cuda(const at::Tensor& x,
                       const at::Tensor& cos,
                       const at::Tensor& sin,
                       bool interleaved);

// Writes the gradient of x, with any strides that x may have. grad_y is [tokens, heads, dim].
void rotary_backward_cuda(const at::Tensor& grad_y,
                          const at::Tensor& cos,
                          const at::Tensor& sin,
                          bool interleaved,
                          at::Tensor& grad_x);

// Turns and splits x [tokens, groups, queries + 1 key, dim] -> query [tokens, groups * queries,
// dim] and key [tokens, groups, dim], each as rotary_cuda() does. The backward writes the gradient
// of x.
struct QueryAndKey {
  at::Tensor query{}, key{};
};
QueryAndKey rotary_split_cuda(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);
void rotary_split_backward_cuda(const QueryAndKey& grads,
                                const at::Tensor& cos,
                                const at::Tensor& sin,
                                at::Tensor& grad_x);

// The norms of heads: weights [dim].
struct HeadNorms {
  at::Tensor query{}, key{};
  double epsilon = 0;
};
// Splits x as rotary_split_cuda() does, but norms each head before it turns, with the bits of
// rms_norm() and rotary_cuda(). Not differentiable.
bool norm_rotary_cuda_supports(const at::Tensor& x, const at::Tensor& cos);
QueryAndKey norm_rotary_cuda(const at::Tensor& x,
                             const HeadNorms& norms,
                             const at::Tensor& cos,
                             const at::Tensor& sin);

}  // namespace ferry::models
