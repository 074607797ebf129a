#include "converter/families/config_limits.h"

#include "distckpt/base/error.h"

namespace ferry::converter {

void require_moderate(const models::TransformerConfig& config, std::string_view source) {
  const auto layers = config.num_layers + config.mtp_num_layers;
  require(config.num_moe_experts * layers <= kMaxExpertsOfAllLayers, ErrorKind::kCorrupt,
          "{}: {} layers of {} experts are more than the {} experts that are handled", source,
          layers, config.num_moe_experts, kMaxExpertsOfAllLayers);
}

}  // namespace ferry::converter
