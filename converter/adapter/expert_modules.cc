#include "converter/adapter/expert_modules.h"

#include <algorithm>

#include "converter/adapter/factors/adapter_map.h"
#include "distckpt/base/error.h"

namespace ferry::converter {
namespace {

constexpr std::string_view kWrapped = ".base_layer";

// Gate and up, or up alone where experts have no gate.
bool is_up(std::string_view parameter) {
  return parameter.ends_with("up_proj");
}

}  // namespace

ExpertModules::ExpertModules(const ModelMap& base) {
  for (std::uint32_t i = 0; i < base.megatron.size(); ++i) {
    const auto& tensor = base.megatron[i];
    if (!tensor.expert || tensor.shape.rank() != 2) continue;
    auto& module = modules_[experts_prefix(base, base.tensors[tensor.parts.front().model].name)];
    module.gated = module.gated || tensor.merge == Merge::kGateUp;
    (tensor.key.find(".linear_fc1.") != tensor.key.npos ? module.up : module.down).push_back(i);
  }
}

std::optional<ExpertModules::Parameter> ExpertModules::find(
    const std::string& module,
    const LoraSettings& settings,
    const std::function<bool(const std::string&)>& exists) const {
  const bool wrapped = module.ends_with(kWrapped);
  const auto name = wrapped ? module.substr(0, module.size() - kWrapped.size()) : module;
  const auto found = modules_.find(name);
  if (found == modules_.end()) return std::nullopt;
  const bool up = wrapped || (!exists(fmt::format("{}{}", name, kWrapped)) &&
                              std::ranges::any_of(settings.target_parameters(), is_up));
  const auto& [ups, downs, gated] = found->second;
  const auto* const parameter = !up ? "down_proj" : gated ? "gate_up_proj" : "up_proj";
  return Parameter{.experts = up ? ups : downs,
                   .name = fmt::format("{}.{}", name.substr(kPeftPrefix.size()), parameter)};
}

}  // namespace ferry::converter
