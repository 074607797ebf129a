#include "trainer/engine/memory_needs.h"

#include <algorithm>

#include "models/distributed/world.h"
#include "models/spec/costs.h"
#include "trainer/engine/pipeline/pipeline_order.h"

namespace ferry::trainer {
namespace {

using models::GPTModel;
using models::Recompute;

double width(std::int64_t size) {
  return static_cast<double>(size);
}

std::int64_t largest_leaf_bytes(const GPTModel& chunk) {
  std::int64_t largest = 0;
  for (const auto& leaf : chunk.parameters().leaves())
    largest = std::max(largest, static_cast<std::int64_t>(leaf.value.nbytes()));
  return largest;
}

models::ChunkOnRank on_rank(const GPTModel& chunk) {
  return {.config = &chunk.config(),
          .mesh = &chunk.mesh().shape(),
          .stage = &chunk.stage(),
          .dtype = chunk.options().dtype,
          .sequence_parallel = chunk.options().sequence_parallel,
          .on_host = !chunk.mesh().world().device().is_cuda()};
}

}  // namespace

std::int64_t activation_bytes(const GPTModel& chunk,
                              const Recompute& recompute,
                              const MicroBatchShape& shape) {
  return static_cast<std::int64_t>(
      models::activation_bytes(on_rank(chunk), recompute, shape.keys).kept * width(shape.tokens));
}

std::int64_t logits_bytes(const GPTModel& chunk, std::int64_t tokens) {
  return models::logits_bytes(on_rank(chunk), tokens, models::OutputHead{}.chunk_tokens);
}

std::int64_t batch_bytes(const std::vector<GPTModel*>& chunks,
                         const Recompute& recompute,
                         const MicroBatchShape& largest,
                         std::size_t num_micro_batches) {
  const auto& mesh = chunks.front()->mesh();
  const auto stages = static_cast<std::size_t>(mesh.shape().pp());
  // An interleaved pipeline takes whole groups.
  const auto groups = chunks.size() > 1 ? stages : 1;
  const auto order =
      pipeline_order({.stages = stages,
                      .stage = static_cast<std::size_t>(mesh.coordinates().pp),
                      .chunks = chunks.size(),
                      .micro_batches = (num_micro_batches + groups - 1) / groups * groups});
  std::vector<double> of_chunk;
  std::vector<double> passing;
  for (const auto* const chunk : chunks) {
    const auto bytes = models::activation_bytes(on_rank(*chunk), recompute, largest.keys);
    of_chunk.push_back(bytes.kept * width(largest.tokens));
    passing.push_back(
        std::max(bytes.passing * width(largest.tokens) + width(largest_leaf_bytes(*chunk)),
                 width(logits_bytes(*chunk, largest.tokens))));
  }
  double kept = 0;
  double most = 0;
  for (const auto& step : order) {
    if (step.forward) kept += of_chunk[step.chunk];
    most = std::max(most, kept + passing[step.chunk]);
    if (!step.forward) kept -= of_chunk[step.chunk];
  }
  return static_cast<std::int64_t>(most);
}

std::int64_t tokens_that_fit(const std::vector<GPTModel*>& chunks,
                             const Recompute& recompute,
                             const MicroBatchShape& like,
                             std::size_t num_micro_batches,
                             std::int64_t bytes) {
  std::int64_t fits = 0;
  for (auto step = std::int64_t{1} << 30; step > 0; step /= 2) {
    const MicroBatchShape longer{.tokens = fits + step, .keys = like.keys};
    if (batch_bytes(chunks, recompute, longer, num_micro_batches) <= bytes) fits += step;
  }
  return fits;
}

}  // namespace ferry::trainer
