// The images of a prompt as the language model takes them: the tokens that they fill, and for every
// token of the prompt its positions in time, height and width (get_rope_index of
// transformers' Qwen3VLModel).
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "models/transformer/visual_rows.h"
#include "models/vision/vision_model.h"
#include "rollout/schedule/sequence.h"
#include "rollout/vision/image_processor.h"

namespace ferry::rollout {

class VisionEncoder;

struct VisualPrompt {
  std::vector<ProcessedImage> images{};
  std::vector<std::int64_t> tokens{};  // indices of the prompt's tokens that are parts of images
  std::array<std::vector<std::int64_t>, 3> positions{};  // of the prompt's tokens
  std::int64_t position_delta = 0;  // position of any later token, less its index
  PrefixHash digest{};              // of the images

  std::int64_t position(std::size_t axis, std::int64_t token) const {
    const auto& of_axis = positions[axis];
    return token < static_cast<std::int64_t>(of_axis.size())
               ? of_axis[static_cast<std::size_t>(token)]
               : token + position_delta;
  }
  // Positions of the first `count` tokens: [3, count], int64.
  at::Tensor positions_of(std::int64_t count) const;
};

// Throws Error(kUsage) unless the prompt has as many tokens of images as the images have.
std::shared_ptr<const VisualPrompt> make_visual_prompt(const models::VisionConfig& config,
                                                       std::span<const std::int64_t> prompt,
                                                       std::vector<ProcessedImage> images);

// Gathers the rows of images in a step, sequence after sequence.
class VisualStep {
 public:
  // The step's rows from `row` on are the tokens [begin, begin + count) of the prompt.
  void add(const VisualPrompt& prompt,
           VisionEncoder& encoder,
           std::int64_t begin,
           std::int64_t count,
           std::int64_t row);
  models::VisualRows rows() const;

 private:
  std::vector<std::int64_t> rows_;
  std::vector<at::Tensor> embeddings_;
  std::vector<std::vector<at::Tensor>> deepstack_;  // by layer
};

}  // namespace ferry::rollout
