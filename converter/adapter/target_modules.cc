#include "converter/adapter/target_modules.h"

#include <array>
#include <map>
#include <set>
#include <string_view>

#include "distckpt/base/error.h"

namespace ferry::converter {
namespace {

// The names of target_modules for a module; none: it is not adapted.
using Targets = std::set<std::string>;

std::string name_in_block(const std::string& module) {
  return module.substr(module.rfind('.') + 1);
}

// "decoder.layers.3.mlp.experts.linear_fc1": the module that holds the parameters of all experts.
std::string module_of(const MegatronTensor& tensor) {
  constexpr std::string_view kOneByOne = ".experts.experts.";
  auto module = tensor.key.substr(0, tensor.key.rfind('.'));
  if (const auto at = module.find(kOneByOne); at != module.npos)
    module.replace(at, kOneByOne.size(), ".experts.");
  return module;
}

// "*decoder.layers.*.mlp.linear_fc1": in any layer. The model may be a part of one that also sees.
// Numbers of layers are none of a pattern: each pipeline stage counts its own from 0.
std::string pattern_of(const std::string& module) {
  constexpr std::string_view kLayers = ".layers.";
  const auto at = module.find(kLayers);
  if (at == module.npos) return "*" + module;
  const auto number = at + kLayers.size();
  return fmt::format("*{}*{}", module.substr(0, number), module.substr(module.find('.', number)));
}

Targets targets_of(const AdaptedParameter& one, const MegatronTensor& of, bool canonical) {
  constexpr std::array<std::string_view, 3> kQkv{"linear_q", "linear_k", "linear_v"};
  constexpr std::array<std::string_view, 2> kGateUp{"linear_fc1_gate", "linear_fc1_up"};
  if (one.part != AdaptedParameter::kFused) {
    const auto part = static_cast<std::size_t>(one.part);
    return {std::string(of.merge == Merge::kQkvGroups ? kQkv.at(part) : kGateUp.at(part))};
  }
  const auto name = name_in_block(module_of(of));
  if (!canonical || (name != "linear_qkv" && name != "linear_fc1")) return {name};
  // One adapter for gate and up, found by their names (_should_treat_linear_fc1_as_unfused).
  if (of.expert) return {kGateUp.begin(), kGateUp.end()};
  throw Error(ErrorKind::kLayout,
              fmt::format("{}: has one first factor, others have several; LoRA of Megatron-Bridge "
                          "has one everywhere, and CanonicalLoRA nowhere but for experts",
                          of.key));
}

}  // namespace

std::vector<std::string> target_modules(const Adapter& adapter, const ModelMap& base) {
  std::map<std::string, Targets> modules;
  for (const auto& tensor : base.megatron) {
    if (tensor.shape.rank() == 2) modules.try_emplace(module_of(tensor));
  }
  for (const auto& one : adapter.adapted) {
    const auto& of = base.megatron[one.megatron];
    modules.at(module_of(of)).merge(targets_of(one, of, adapter.canonical));
  }
  std::map<std::string, std::set<Targets>> by_name;
  std::map<std::string, Targets> by_pattern;
  for (const auto& [module, targets] : modules) {
    by_name[name_in_block(module)].insert(targets);
    const auto& others = by_pattern.emplace(pattern_of(module), targets).first->second;
    require(others == targets, ErrorKind::kLayout,
            "{}: is not adapted as in other layers, and Megatron-Bridge adapts a module in all",
            module);
  }
  std::set<std::string> listed;
  for (const auto& [module, targets] : modules) {
    const auto name = name_in_block(module);
    auto before = by_name.at(name).size() == 1 ? name : pattern_of(module);
    before.erase(before.size() - name.size());
    for (const auto& target : targets) listed.insert(before + target);
  }
  return {listed.begin(), listed.end()};
}

}  // namespace ferry::converter
