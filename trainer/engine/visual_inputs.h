// Images of sequences that pass through a model which is trained: the tower runs prompt by prompt,
// with gradient if it is trained, when a micro-batch comes to a stage that takes what it gives, and
// nothing is held longer than the pass needs it.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "models/gpt_model.h"
#include "models/transformer/packed_sequences.h"
#include "rollout/vision/vision_encoder.h"
#include "trainer/engine/pipeline/pipeline_schedule.h"
#include "trainer/engine/seqlen_balancing.h"

namespace ferry::trainer {

// Images of each sequence, or null; empty: no sequence has some.
using VisualSequences = std::vector<std::shared_ptr<const rollout::VisualPrompt>>;

struct VisualInputs {
  VisualSequences sequences{};
  rollout::VisionEncoder* vision = nullptr;  // the tower
};

// Rows for the sequences' micro-batches `parts`, which are packed as `batches`. All outlive the
// function, which is empty where no sequence has images.
VisualFunction visual_function(const VisualInputs& visual,
                               const std::vector<models::GPTModel*>& chunks,
                               std::span<const models::SequencePartition> batches,
                               std::span<const Partition> parts);

// Positions in time, height and width of the sequences of a pack, whose lengths are given: [3,
// tokens]; undefined if none has images.
at::Tensor visual_positions(const VisualSequences& visual,
                            const std::vector<at::Tensor>& sequences);

}  // namespace ferry::trainer
