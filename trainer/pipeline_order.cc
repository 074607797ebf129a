#include "trainer/pipeline_order.h"

#include <algorithm>

#include "distckpt/error.h"

namespace ferry::trainer {
namespace {

// Megatron's get_schedule_table: groups of micro-batches, in each chunk after chunk.
std::vector<PipelineStep> forward_steps(const PipelineShape& shape) {
  const auto group = shape.chunks == 1 ? 1 : shape.stages;
  std::vector<PipelineStep> steps;
  for (std::size_t first = 0; first < shape.micro_batches; first += group) {
    for (std::size_t chunk = 0; chunk < shape.chunks; ++chunk) {
      for (auto i = first; i < std::min(first + group, shape.micro_batches); ++i)
        steps.push_back({.chunk = chunk, .micro_batch = i});
    }
  }
  return steps;
}

// Forward passes before the first backward one, get_pp_rank_microbatches.
std::size_t num_warmup(const PipelineShape& shape) {
  const auto behind = shape.stages - shape.stage - 1;
  if (shape.chunks == 1) return behind;
  return 2 * behind + (shape.chunks - 1) * shape.stages;
}

// One stage: each micro-batch through all chunks and back.
std::vector<PipelineStep> without_pipelining(const std::vector<PipelineStep>& forward,
                                             std::size_t chunks) {
  std::vector<PipelineStep> steps;
  for (std::size_t first = 0; first < forward.size(); first += chunks) {
    for (std::size_t i = 0; i < chunks; ++i) steps.push_back(forward[first + i]);
    for (std::size_t i = chunks; i-- > 0;) {
      steps.push_back(forward[first + i]);
      steps.back().forward = false;
    }
  }
  return steps;
}

}  // namespace

std::vector<PipelineStep> pipeline_order(const PipelineShape& shape) {
  const auto rest = shape.micro_batches % shape.stages;
  require(shape.chunks == 1 || rest == 0, ErrorKind::kUsage,
          "{} micro-batches in an interleaved pipeline are no multiple of its {} stages",
          shape.micro_batches, shape.stages);
  const auto forward = forward_steps(shape);
  if (shape.forward_only) return forward;
  if (shape.stages == 1) return without_pipelining(forward, shape.chunks);
  auto backward = forward;
  for (auto& step : backward) {
    step.forward = false;
    step.chunk = shape.chunks - 1 - step.chunk;
  }
  const auto warmup = std::min(num_warmup(shape), forward.size());
  std::vector<PipelineStep> steps(forward.begin(),
                                  forward.begin() + static_cast<std::ptrdiff_t>(warmup));
  for (auto i = warmup; i < forward.size(); ++i) {
    steps.push_back(forward[i]);
    steps.push_back(backward[i - warmup]);
  }
  for (auto i = forward.size() - warmup; i < backward.size(); ++i) steps.push_back(backward[i]);
  return steps;
}

}  // namespace ferry::trainer
