#include "trainer/engine/visual_inputs.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>

#include <algorithm>

#include "distckpt/base/error.h"
#include "trainer/plan/memory_needs.h"

namespace ferry::trainer {
namespace {

bool any_of(const VisualSequences& visual) {
  return std::ranges::any_of(visual, [](const auto& one) { return one != nullptr; });
}

static_assert(rollout::VisionEncoder::kCachedTokens == kHeldImageTokens);

}  // namespace

VisualFunction visual_function(const VisualInputs& visual,
                               const std::vector<models::GPTModel*>& chunks,
                               std::span<const models::SequencePartition> batches,
                               std::span<const Partition> parts) {
  if (!any_of(visual.sequences)) return {};
  require(visual.vision != nullptr, ErrorKind::kBug, "images for a model that does not see");
  return
      [&visual, &chunks, batches, parts](std::size_t chunk, std::size_t i) -> models::VisualRows {
        if (!takes_images(chunks[chunk]->config(), chunks[chunk]->stage())) return {};
        const bool trained = chunks[chunk]->vision() != nullptr;
        if (trained) visual.vision->forget();  // what other weights gave
        const auto& ends = batches[i].cu_seqlens();
        rollout::VisualStep step;
        for (std::size_t j = 0; j < parts[i].size(); ++j) {
          const auto& images = visual.sequences[parts[i][j]];
          if (images != nullptr)
            step.add(*images, *visual.vision, 0, ends[j + 1] - ends[j], ends[j]);
        }
        if (trained) visual.vision->forget();  // the pass alone keeps what its backward needs
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
