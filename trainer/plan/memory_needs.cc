#include "trainer/plan/memory_needs.h"

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "distckpt/base/integers.h"
#include "trainer/plan/pipeline_order.h"

namespace ferry::trainer {
namespace {

using models::Recompute;

double width(std::int64_t size) {
  return static_cast<double>(size);
}

// Experts of a layer lie in one tensor each for all of them.
std::int64_t largest_leaf_of(const std::vector<models::ParameterSpec>& parameters) {
  std::map<std::string, std::int64_t> leaves;
  for (const auto& spec : parameters) {
    auto key = spec.key;
    constexpr std::string_view kExperts = ".experts.experts.";
    if (const auto at = key.find(kExperts); at != std::string::npos)
      key.erase(at + kExperts.size(), key.find('.', at + kExperts.size()) - at - kExperts.size());
    leaves[key] += spec.shape.product() * distckpt::size_of(spec.dtype);
  }
  std::int64_t largest = 0;
  for (const auto& [key, bytes] : leaves) largest = std::max(largest, bytes);
  return largest;
}

std::int64_t bytes_of_vision(const models::TransformerConfig& config,
                             const models::MeshShape& mesh,
                             const models::MeshCoordinates& at,
                             const models::LayoutOptions& layout) {
  const auto num_features =
      1 + static_cast<std::int64_t>(config.vision->deepstack_visual_indexes.size());
  std::int64_t bytes =
      kHeldImageTokens * num_features * config.hidden_size * distckpt::size_of(layout.dtype);
  if (layout.vision_tower && config.computes_vision()) return bytes;
  for (const auto& spec : models::vision_layout(config, mesh, at, layout))
    bytes += spec.shape.product() * distckpt::size_of(spec.dtype);
  return bytes;
}

}  // namespace

bool takes_images(const models::TransformerConfig& config, const models::StageSpec& stage) {
  if (!config.vision) return false;
  const auto deepstack = static_cast<std::int64_t>(config.vision->deepstack_visual_indexes.size());
  return stage.pre_process ||
         std::ranges::any_of(stage.layers, [&](auto layer) { return layer < deepstack; });
}

ModelOnRank::ModelOnRank(models::TransformerConfig config,
                         const EngineConfig& engine,
                         const models::MeshShape& mesh,
                         const models::MeshCoordinates& at,
                         const models::TrainingDtypes& dtypes,
                         bool on_host)
    : config_(std::move(config)),
      mesh_(mesh),
      at_(at),
      layout_{.alignment = engine.alignment,
              .dtype = engine.dtype,
              .vision_tower = !engine.freeze_vision_tower},
      recompute_(engine.recompute()),
      sequence_parallel_(engine.uses_sequence_parallel()),
      on_host_(on_host),
      stages_(models::stage_chunks(config_, mesh_.parallel(), at_.pp)) {
  for (const auto& stage : stages_) {
    const auto parameters = models::parameter_layout(config_, mesh_, at_, stage, layout_);
    largest_leaves_.push_back(largest_leaf_of(parameters));
    memory_ += models::model_memory(parameters, mesh_, dtypes);
  }
  const bool takes =
      std::ranges::any_of(stages_, [&](const auto& stage) { return takes_images(config_, stage); });
  if (takes) {
    vision_bytes_ = bytes_of_vision(config_, mesh_, at_, layout_);
    if (layout_.vision_tower && config_.computes_vision())
      vision_activation_bytes_ =
          models::vision_activation_bytes(*config_.vision, config_.hidden_size, layout_.dtype);
  }
  if (engine.optimizer_offload.value_or(false) && !on_host_) {
    memory_.on_host = memory_.optimizer;
    memory_.optimizer = std::min(memory_.on_host, models::kMaxStagingBytes);
  }
}

models::ModelMemory ModelOnRank::memory(bool trains) const {
  return trains ? memory_ : models::ModelMemory{.parameters = memory_.parameters};
}

std::vector<models::ChunkOnRank> ModelOnRank::chunks() const {
  std::vector<models::ChunkOnRank> chunks;
  for (const auto& stage : stages_)
    chunks.push_back({.config = &config_,
                      .mesh = &mesh_,
                      .stage = &stage,
                      .dtype = layout_.dtype,
                      .sequence_parallel = sequence_parallel_,
                      .on_host = on_host_,
                      .alignment = layout_.alignment});
  return chunks;
}

BatchBytes batch_bytes(const ModelOnRank& model,
                       const Recompute& recompute,
                       const MicroBatchShape& largest,
                       std::size_t num_micro_batches) {
  const auto chunks = model.chunks();
  const auto stages = static_cast<std::size_t>(model.mesh().pp());
  // An interleaved pipeline takes whole groups.
  const auto groups = chunks.size() > 1 ? stages : 1;
  const auto order =
      pipeline_order({.stages = stages,
                      .stage = static_cast<std::size_t>(model.at().pp),
                      .chunks = chunks.size(),
                      .micro_batches = distckpt::round_up(num_micro_batches, groups)});
  std::vector<double> of_chunk;
  std::vector<double> passing;
  std::vector<std::int64_t> logits;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    const auto bytes = models::activation_bytes(chunks[i], recompute, largest.keys);
    of_chunk.push_back(bytes.kept * width(largest.tokens));
    passing.push_back(bytes.passing * width(largest.tokens) + width(model.largest_leaf(i)));
    logits.push_back(models::logits_bytes(chunks[i], largest.tokens));
  }
  double kept = 0;
  double most = -1;
  BatchBytes bytes;
  for (const auto& step : order) {
    if (step.forward) kept += of_chunk[step.chunk];
    const auto of_logits = logits[step.chunk];
    const auto now = kept + std::max(passing[step.chunk], width(of_logits));
    if (now > most) {
      most = now;
      const bool in_loss = width(of_logits) > passing[step.chunk];
      bytes = {.activations = static_cast<std::int64_t>(kept + (in_loss ? 0 : passing[step.chunk])),
               .logits = in_loss ? of_logits : 0};
    }
    if (!step.forward) kept -= of_chunk[step.chunk];
  }
  bytes.activations += std::min(largest.tokens, kHeldImageTokens) * model.vision_activation_bytes();
  return bytes;
}

std::int64_t logits_bytes(const ModelOnRank& model, std::int64_t tokens) {
  return models::logits_bytes(model.chunks().back(), tokens);
}

std::int64_t tokens_that_fit(const ModelOnRank& model,
                             const Recompute& recompute,
                             const MicroBatchShape& like,
                             std::size_t num_micro_batches,
                             std::int64_t bytes) {
  std::int64_t fits = 0;
  for (auto step = std::int64_t{1} << 30; step > 0; step /= 2) {
    const MicroBatchShape longer{.tokens = fits + step, .keys = like.keys};
    if (batch_bytes(model, recompute, longer, num_micro_batches).total() <= bytes) fits += step;
  }
  return fits;
}

std::int64_t usable(std::int64_t room, bool on_host) {
  return static_cast<std::int64_t>((on_host ? 0.8 : 0.95) * width(room));
}

}  // namespace ferry::trainer
