#include "trainer/engine/visual_inputs.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>

#include <algorithm>

#include "distckpt/base/error.h"

namespace ferry::trainer {
namespace {

bool any_of(const VisualSequences& visual) {
  return std::ranges::any_of(visual, [](const auto& one) { return one != nullptr; });
}

// The embedding takes the place of images' tokens, and the first layers add to them.
bool takes_images(const models::GPTModel& chunk) {
  const auto& stage = chunk.stage();
  const auto deepstack =
      static_cast<std::int64_t>(chunk.config().vision->deepstack_visual_indexes.size());
  return stage.pre_process ||
         std::ranges::any_of(stage.layers, [&](auto layer) { return layer < deepstack; });
}

}  // namespace

VisualFunction visual_function(rollout::VisionEncoder* encoder,
                               const std::vector<models::GPTModel*>& chunks,
                               std::span<const models::SequencePartition> batches,
                               std::span<const Partition> parts,
                               const VisualSequences& visual) {
  if (!any_of(visual)) return {};
  require(encoder != nullptr, ErrorKind::kBug, "images for a model that does not see");
  return [encoder, &chunks, batches, parts, &visual](std::size_t chunk,
                                                     std::size_t i) -> models::VisualRows {
    if (!takes_images(*chunks[chunk])) return {};
    const auto& ends = batches[i].cu_seqlens();
    rollout::VisualStep step;
    for (std::size_t j = 0; j < parts[i].size(); ++j) {
      const auto& images = visual[parts[i][j]];
      if (images != nullptr) step.add(*images, *encoder, 0, ends[j + 1] - ends[j], ends[j]);
    }
    return batches[i].local(step.rows());
  };
}

at::Tensor visual_positions(const VisualSequences& visual,
                            const std::vector<at::Tensor>& sequences) {
  if (!any_of(visual)) return {};
  std::vector<at::Tensor> positions;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const auto count = sequences[i].size(0);
    positions.push_back(visual[i] != nullptr ? visual[i]->positions_of(count)
                                             : at::arange(count, at::kLong).expand({3, count}));
  }
  return at::cat(positions, 1);
}

}  // namespace ferry::trainer
