// The arguments of every layer in a forward pass besides its input, and of every module when it is
// made.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

#include "models/distributed/parallel_state.h"
#include "models/kernels/rotary.h"
#include "models/spec/transformer_config.h"
#include "models/tensor_parallel/layers.h"
#include "models/transformer/inference_context.h"
#include "models/transformer/packed_sequences.h"
#include "models/transformer/recompute.h"
#include "models/transformer/router_replay.h"
#include "models/transformer/visual_rows.h"

namespace ferry::models {

// A callback that gets a module's name, "decoder.layers.3.self_attention", and its output [tokens,
// hidden], as it is between the layers.
using Observer = std::function<void(const std::string& module, const at::Tensor& output)>;

// The settings that modules are made with. It must outlive them.
struct ModelSetup {
  const TransformerConfig& config;
  const ParallelState& mesh;
  TensorParallel tensor_parallel;  // of everything but the experts
  bool deterministic = true;       // gradients have the same bits at every run
  Recompute recompute{};

  Alignment alignment() const { return tensor_parallel.alignment; }
};

struct LayerContext {
  const SequencePartition* batch = nullptr;  // null in generation
  PositionAngles positions{};
  Observer observe{};                     // may be empty
  InferenceContext* inference = nullptr;  // of generation
  RouterReplay routes{};                  // of experts
  const VisualRows* visual = nullptr;     // of images; or null
};

}  // namespace ferry::models
