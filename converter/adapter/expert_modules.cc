#include "converter/adapter/expert_modules.h"

#include <algorithm>

#include "converter/adapter/adapter_map.h"
#include "distckpt/base/error.h"

namespace ferry::converter {
namespace {

constexpr std::string_view kWrapped = ".base_layer";

bool targets_gate_up(const LoraSettings& settings) {
  return std::ranges::any_of(settings.target_parameters(),
                             [](const auto& name) { return name.ends_with("gate_up_proj"); });
}

}  // namespace

ExpertModules::ExpertModules(const ModelMap& base) {
  for (std::uint32_t i = 0; i < base.megatron.size(); ++i) {
    const auto& tensor = base.megatron[i];
    if (!tensor.expert || tensor.shape.rank() != 2) continue;
    auto& module = modules_[experts_prefix(base.tensors[tensor.parts.front().model].name)];
    (tensor.merge == Merge::kGateUp ? module.gate_up : module.down).push_back(i);
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
  const bool gate_up =
      wrapped || (!exists(fmt::format("{}{}", name, kWrapped)) && targets_gate_up(settings));
  return Parameter{.experts = gate_up ? found->second.gate_up : found->second.down,
                   .name = fmt::format("{}.{}", name.substr(kPeftPrefix.size()),
                                       gate_up ? "gate_up_proj" : "down_proj")};
}

}  // namespace ferry::converter
