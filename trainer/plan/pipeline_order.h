// The order of the forward and backward passes of a pipeline stage's chunks, the schedules of
// Megatron-Core (pipeline_parallel/schedules.py) as lists, and when their results travel. Each
// chunk's backward passes come in the order of the micro-batches, so that sums of gradients are the
// same for every pipeline.
//
// A message is under way between two stages only in the round in which it is made, of which both
// know: no stage that waits for the messages of a round waits for what comes after it. NCCL asks
// for that, whose sends, too, are kernels that run until the other side has come, while allocations
// and the loading of code wait for kernels that run.
#pragma once

#include <cstddef>
#include <optional>
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

// The result of a pass, on its way to the stage that has the next chunk, or the chunk before.
struct PipelineTransfer {
  bool forward = true;    // activations, else gradients
  std::size_t chunk = 0;  // of `to`, that takes it
  std::size_t micro_batch = 0;
  std::size_t from = 0;  // stages, not the same
  std::size_t to = 0;

  bool operator==(const PipelineTransfer&) const = default;
};

struct PipelineRound {
  std::size_t number = 0;  // the same on all stages
  std::optional<PipelineStep> step{};
  // Messages behind the step, of this stage and its neighbours, in one order on all stages.
  std::vector<PipelineTransfer> transfers{};
};

// pipeline_order() with its messages: in each round every stage runs its next pass, if what it
// takes has come by then.
std::vector<PipelineRound> pipeline_rounds(const PipelineShape& shape);

}  // namespace ferry::trainer
