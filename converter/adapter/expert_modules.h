// The experts of a layer as PEFT adapts them together (target_parameters): one module, whose
// parameters are gate and up of all experts, and down of all experts.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "converter/adapter/factors/lora_settings.h"
#include "converter/families/model_map.h"

namespace ferry::converter {

class ExpertModules {
 public:
  explicit ExpertModules(const ModelMap& base);

  struct Parameter {
    const std::vector<std::uint32_t>& experts;  // indices into the base's parameters
    std::string name{};  // "model.layers.0.mlp.experts.gate_up_proj", to which settings refer
  };

  // The parameter that the factors of a module change. `module` is peft_module()'s; two parameters
  // of a module wrap each other, gate and up innermost (".base_layer"). Nothing: it is no module of
  // experts. `exists` tells which modules the adapter has.
  std::optional<Parameter> find(const std::string& module,
                                const LoraSettings& settings,
                                const std::function<bool(const std::string&)>& exists) const;

 private:
  struct Parameters {
    std::vector<std::uint32_t> up{};  // with the gate, where there is one
    std::vector<std::uint32_t> down{};
    bool gated = false;
  };
  std::map<std::string, Parameters> modules_;  // by experts_prefix
};

}  // namespace ferry::converter
