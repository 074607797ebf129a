// The rows of a step that stand for parts of images: what a vision tower made of these takes the
// place of their embeddings, and is added again behind the first layers (DeepStack,
// arXiv:2406.04334).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace ferry::models {

struct VisualRows {
  at::Tensor rows{};                    // [n], int64; undefined: none
  at::Tensor embeddings{};              // [n, hidden]
  std::vector<at::Tensor> deepstack{};  // [n, hidden] of each of the first layers

  bool any() const { return rows.defined(); }
  // [tokens, hidden] -> like it, with the images in their rows.
  at::Tensor embed(const at::Tensor& embedded) const;
  // Adds to what a layer gives, [tokens, hidden], counted from the model's first layer.
  at::Tensor add(std::int64_t layer, const at::Tensor& hidden) const;
  // Some of the images' rows, whose places among the step's rows are `places`.
  VisualRows select(const at::Tensor& places, const at::Tensor& chosen) const;
  // Rows [begin, begin + count) of the step alone, which count from `begin` there. If the images
  // have gradients there may be no row, and still they are any(): all ranks take part in the
  // backward.
  VisualRows part(std::int64_t begin, std::int64_t count) const;
  bool adds_to(std::int64_t layer) const {
    return any() && layer < static_cast<std::int64_t>(deepstack.size());
  }
};

}  // namespace ferry::models
