#include "models/spec/roofline.h"

#include <algorithm>

#include "models/spec/costs.h"
#include "models/spec/parameters.h"

namespace ferry::models {

Roofline::Roofline(const TransformerConfig& config,
                   const MeshShape& mesh,
                   const LayoutOptions& options,
                   DeviceRates rates)
    : rates_(rates), item_bytes_(static_cast<double>(distckpt::size_of(options.dtype))) {
  const bool tied = !config.untie_embeddings_and_output_weights;
  for (const auto& stage : stage_chunks(config, mesh.parallel(), 0)) {
    for (const auto& spec : parameter_layout(config, mesh, {}, stage, options)) {
      const auto bytes = static_cast<double>(spec.shape.product() * distckpt::size_of(spec.dtype));
      if (spec.key.starts_with("mtp.")) continue;
      if (spec.key == kOutputLayerKey || (tied && spec.key == kEmbeddingKey)) {
        head_bytes_ += bytes;
      } else if (spec.expert) {
        expert_bytes_ += bytes;
      } else if (spec.key != kEmbeddingKey) {
        dense_bytes_ += bytes;
      }
    }
  }
  if (config.num_moe_experts > 0)
    experts_of_row_ = static_cast<double>(config.moe_router_topk * mesh.ep()) /
                      static_cast<double>(config.num_moe_experts);
  key_bytes_ = static_cast<double>(key_value_bytes(config, mesh.tp(), options));
}

double Roofline::seconds(const StepWork& work) const {
  if (work.rows == 0) return 0;
  const auto rows = static_cast<double>(work.rows), drawn = static_cast<double>(work.drawn);
  const double bytes = dense_bytes_ + expert_bytes_ * std::min(1.0, rows * experts_of_row_) +
                       (work.drawn > 0 ? head_bytes_ : 0) +
                       key_bytes_ * static_cast<double>(work.cached_keys);
  const double flops =
      2 / item_bytes_ *
      (rows * (dense_bytes_ + expert_bytes_ * experts_of_row_) + drawn * head_bytes_);
  return std::max(bytes / rates_.bytes_per_second, flops / rates_.flops_per_second);
}

}  // namespace ferry::models
