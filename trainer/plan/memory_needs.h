// The memory that a rank needs for its part of a model, by the costs of models/spec/costs.h: what
// it holds, and what the micro-batches of a batch take in the order of its pipeline schedule.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "models/spec/costs.h"
#include "models/spec/mesh_shape.h"
#include "models/spec/recompute.h"
#include "models/spec/sharding.h"
#include "models/spec/transformer_config.h"
#include "trainer/config/run_sections.h"

namespace ferry::trainer {

// Tokens of images whose features a tower holds.
inline constexpr std::int64_t kHeldImageTokens = 8192;

// True if a chunk takes features of images: of a model that sees, the embedding does, and the
// first layers.
bool takes_images(const models::TransformerConfig& config, const models::StageSpec& stage);

// A rank's part of a model.
class ModelOnRank {
 public:
  ModelOnRank(models::TransformerConfig config,
              const EngineConfig& engine,
              const models::MeshShape& mesh,
              const models::MeshCoordinates& at,
              const models::TrainingDtypes& dtypes,
              bool on_host);

  const models::TransformerConfig& config() const { return config_; }
  const models::MeshShape& mesh() const { return mesh_; }
  const models::MeshCoordinates& at() const { return at_; }
  const models::Recompute& recompute() const { return recompute_; }
  bool on_host() const { return on_host_; }
  // Parameters, and where the role learns, gradients and optimizer: on a GPU with
  // optimizer_offload, the host's part and the slots through which it passes.
  models::ModelMemory memory(bool trains) const;
  std::vector<models::ChunkOnRank> chunks() const;      // point into this
  std::int64_t largest_leaf(std::size_t chunk) const {  // bytes
    return largest_leaves_[chunk];
  }
  // The features that a vision tower holds on a rank that takes images, from the first prompt with
  // an image on, and the tower, if it is not one of the parameters.
  std::int64_t vision_bytes() const { return vision_bytes_; }
  // The backward pass of a tower that is trained needs so much of a token of an image.
  std::int64_t vision_activation_bytes() const { return vision_activation_bytes_; }
  const models::LayoutOptions& layout() const { return layout_; }

 private:
  models::TransformerConfig config_;
  models::MeshShape mesh_;
  models::MeshCoordinates at_;
  models::LayoutOptions layout_;
  models::Recompute recompute_;
  bool sequence_parallel_;
  bool on_host_;
  std::vector<models::StageSpec> stages_;
  std::vector<std::int64_t> largest_leaves_;
  models::ModelMemory memory_;
  std::int64_t vision_bytes_ = 0;
  std::int64_t vision_activation_bytes_ = 0;
};

// A rank's part of a pack.
struct MicroBatchShape {
  std::int64_t tokens = 0;
  // Keys that a token attends to, padding of the causal half included: the mean of the lengths,
  // weighed by themselves. Only the host keeps attention's probabilities.
  double keys = 0;
};

// Bytes at the moment of a batch at which they are the most.
struct BatchBytes {
  std::int64_t activations = 0;
  std::int64_t logits = 0;

  std::int64_t total() const { return activations + logits; }
};

// The most that the passes of a batch need at once, as if every token were learned from: batches on
// their way, a backward pass in its layer, the loss, up to kHeldImageTokens in a tower that is
// trained; not oneDNN's 10 KiB to 2 MiB a host thread.
// Experts are taken to have equal shares.
BatchBytes batch_bytes(const ModelOnRank& model,
                       const models::Recompute& recompute,
                       const MicroBatchShape& largest,
                       std::size_t num_micro_batches);

// The part of it that the output layer and the loss take while they run; 0 on other stages.
std::int64_t logits_bytes(const ModelOnRank& model, std::int64_t tokens);

// The longest micro-batch, of this mean length, whose batch fits into so many bytes.
std::int64_t tokens_that_fit(const ModelOnRank& model,
                             const models::Recompute& recompute,
                             const MicroBatchShape& like,
                             std::size_t num_micro_batches,
                             std::int64_t bytes);

// A pass that is not learned from keeps nothing but the layer that it is in, as one does that
// computes all layers again: what that keeps besides makes this an upper bound.
inline constexpr models::Recompute kForwardOnly{.granularity =
                                                    models::Recompute::Granularity::kFull};

// The part of `room` free bytes that allocators can make use of: they lose some to rounding and
// holes.
std::int64_t usable(std::int64_t room, bool on_host);

}  // namespace ferry::trainer
