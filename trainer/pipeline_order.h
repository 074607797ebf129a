// In which order a pipeline stage runs the forward and backward passes of its chunks: the schedules
// of Megatron-Core (pipeline_parallel/schedules.py) as lists. Sends never wait for receivers, and
// messages of one kind between two stages are taken in the order they were sent in: then these
// lists run to their end on all stages, and each chunk's backward passes come in the order of the
// micro-batches, so that sums of gradients are the same for every pipeline.
#pragma once

#include <cstddef>
#include <vector>

namespace ferry::trainer {

struct PipelineStep {
  bool forward = true;
  std::size_t chunk = 0;
  std::size_t micro_batch = 0;

  bool operator==(const PipelineStep&) const = default;
};

struct PipelineShape {
  std::size_t stages = 1;
  std::size_t stage = 0;
  std::size_t chunks = 1;  // of each stage; more than one: interleaved
  std::size_t micro_batches = 1;
  bool forward_only = false;
};

// One stage: one micro-batch after the other. Several: as few forward passes as keep all stages
// busy first, then backward and forward in turn (1F1B); interleaved, as many micro-batches as there
// are stages go through one chunk before the next. Throws Error(kUsage) where an interleaved
// pipeline has a last group of fewer micro-batches than stages.
std::vector<PipelineStep> pipeline_order(const PipelineShape& shape);

}  // namespace ferry::trainer
