// The operations of a vision tower whose backward is not autograd's own: that has other bits at
// every run on a GPU, or leaves open which kernel a forward with gradient takes.
#pragma once

#include <ATen/core/Tensor.h>

#include "models/spec/alignment.h"

namespace ferry::models {

// Each patch by itself: pixels [patches, channels, frames, height, width], weight [hidden, the
// same], bias [hidden] -> [patches, hidden]. Without gradient of the pixels.
at::Tensor patch_embed(const at::Tensor& pixels,
                       const at::Tensor& weight,
                       const at::Tensor& bias,
                       Alignment alignment);

// Eager attention of some of a frame's patches, query [1, heads, rows, dim], to all of them, key
// and value [1, heads, patches, dim]; not causal -> [1, rows, heads, dim]. Differentiable.
at::Tensor eager_attention_of_frame(const at::Tensor& query,
                                    const at::Tensor& key,
                                    const at::Tensor& value,
                                    double scale,
                                    Alignment alignment);

// Flash attention on a GPU, not causal: [1, heads, patches, dim], bf16 each -> [1, patches, heads,
// dim]. Gradients have the same bits at every run.
at::Tensor flash_attention_of_frame(const at::Tensor& query,
                                    const at::Tensor& key,
                                    const at::Tensor& value,
                                    double scale);

}  // namespace ferry::models
