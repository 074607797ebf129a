// The vision tower of Qwen3-VL: patches of images become embeddings of the language model, those of
// some blocks besides, which its first layers add (DeepStack). A rank that has it holds it whole,
// and computes all images of a prompt together, by the operations of transformers' model in its
// order, "eager" on the host and with flash attention on a GPU: their bits are its bits. One that
// is trained is part of a GPTModel; its backward pass computes the blocks again.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "models/distributed/parallel_state.h"
#include "models/spec/alignment.h"
#include "models/spec/transformer_config.h"
#include "models/tensor_parallel/parameters.h"

namespace ferry::models {

// The patches of an image: image_grid_thw of transformers.
struct ImageGrid {
  std::int64_t frames = 1;
  std::int64_t height = 0;
  std::int64_t width = 0;

  std::int64_t num_patches() const { return frames * height * width; }
};

struct ImageFeatures {
  at::Tensor embeddings{};              // [tokens, hidden], of all images one after another
  std::vector<at::Tensor> deepstack{};  // [tokens, hidden] each
};

struct PatchPlaces;  // vision_model.cc
struct Rotation;     // the same

class VisionModel {
 public:
  // A tower that is not trained. The mesh outlives this. Throws Error(kLayout) if the configuration
  // has no tower or one that is not computed.
  VisionModel(const TransformerConfig& config,
              const ParallelState& mesh,
              distckpt::DType dtype,
              Alignment alignment);
  // The tower among the parameters of a model, which outlive this, too.
  VisionModel(const TransformerConfig& config,
              const ParallelState& mesh,
              Alignment alignment,
              Parameters& parameters);
  VisionModel(const VisionModel&) = delete;
  VisionModel& operator=(const VisionModel&) = delete;

  // pixel_values [patches, channels * frames * height * width of a patch], fp32, those of a token
  // side by side, on any device; the result is on the mesh's, with gradient if the tower is
  // trained.
  ImageFeatures forward(const at::Tensor& pixel_values, std::span<const ImageGrid> grids) const;

  const ParallelState& mesh() const { return mesh_; }
  const TransformerConfig& config() const { return config_; }
  // Shards of a tower that is not part of a model.
  std::vector<distckpt::LocalShard> sharded_state_dict() const {
    return own_->sharded_state_dict();
  }

 private:
  struct Norm {
    at::Tensor weight{}, bias{};
  };
  struct Linear {
    at::Tensor weight{}, bias{};
  };
  struct Block {
    Norm norm1{}, norm2{};
    Linear qkv{}, proj{}, fc1{}, fc2{};
  };
  struct Merger {
    Norm norm{};
    Linear fc1{}, fc2{};
    bool over_token = false;  // its norm is over the patches of a token together
  };

  VisionModel(const TransformerConfig& config,
              const ParallelState& mesh,
              Alignment alignment,
              std::unique_ptr<Parameters> own);
  static std::unique_ptr<Parameters> make_parameters(const TransformerConfig& config,
                                                     const ParallelState& mesh,
                                                     const LayoutOptions& options);
  void take_all(Parameters& parameters);
  Linear take_linear(Parameters& parameters, const std::string& name);
  Norm take_norm(Parameters& parameters, const std::string& name, const char* separator);
  Merger take_merger(Parameters& parameters, const std::string& prefix, bool over_token);
  at::Tensor apply(const at::Tensor& x, const Linear& layer) const;
  at::Tensor position_embeddings(const PatchPlaces& places) const;
  at::Tensor attend(const Block& block,
                    const at::Tensor& normed,
                    const Rotation& rotation,
                    std::span<const ImageGrid> grids) const;
  at::Tensor run_block(const Block& block,
                       const at::Tensor& x,
                       const Rotation& rotation,
                       std::span<const ImageGrid> grids) const;
  at::Tensor merge(const at::Tensor& x, const Merger& merger) const;

  TransformerConfig config_;
  const ParallelState& mesh_;
  Alignment alignment_;
  std::unique_ptr<Parameters> own_;  // null of a tower that is trained
  Linear patch_embed_{};
  at::Tensor pos_embed_;
  std::vector<Block> blocks_;
  Merger merger_{};
  std::vector<Merger> deepstack_;
};

}  // namespace ferry::models
