#include "converter/adapter/adapter_files.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "converter/adapter/factors/lora_settings.h"
#include "converter/adapter/target_modules.h"
#include "distckpt/base/error.h"
#include "distckpt/base/json.h"

namespace ferry::converter {
namespace {

using nlohmann::ordered_json;

// An alpha that is a whole number is written as one: scaling is alpha / rank in fp32.
ordered_json as_number(double value) {
  constexpr double kLargest = 1e15;
  if (value < kLargest && std::abs(value - std::round(value)) < 1e-6 * value)
    return std::llround(value);
  return value;
}

double alpha_of(const Adapter& adapter, std::size_t i) {
  return static_cast<double>(adapter.scaling[i]) * static_cast<double>(adapter.adapted[i].rank);
}

std::string last_name(const std::string& name) {
  return name.substr(name.rfind('.') + 1);
}

constexpr std::size_t kWhole = std::string::npos;

// The last names of a whole name.
std::string ending(const std::string& name, std::size_t names_kept) {
  auto at = name.size();
  for (std::size_t i = 0; i < names_kept && at != name.npos; ++i) at = name.rfind('.', at - 1);
  return at == name.npos ? name : name.substr(at + 1);
}

// The adapted modules, each by its last names where the base has nothing else that ends so, else
// whole.
std::vector<std::string> targets(const std::set<std::string>& adapted,
                                 const std::set<std::string>& all,
                                 std::size_t names_kept) {
  std::map<std::string, std::int64_t> counts;
  for (const auto& name : all) ++counts[ending(name, names_kept)];
  std::map<std::string, std::vector<std::string>> by_ending;
  for (const auto& name : adapted) by_ending[ending(name, names_kept)].push_back(name);
  std::vector<std::string> listed;
  for (const auto& [end, those] : by_ending) {
    if (std::ssize(those) == counts.at(end)) {
      listed.push_back(end);
    } else {
      listed.insert(listed.end(), those.begin(), those.end());
    }
  }
  return listed;
}

// The names that PEFT adapts: modules, and parameters of others (target_parameters).
struct PeftModules {
  std::set<std::string> linear{};
  std::set<std::string> parameters{};

  void add(const ModelMap& base, const MegatronTensor& of, int part, ExpertNames names) {
    const auto merged = merged_tensors(of);
    if (of.expert && names == ExpertNames::kTogether) {
      const auto name =
          experts_prefix(base, base.tensors[merged.front()].name).substr(kPeftPrefix.size());
      parameters.insert(name + (of.merge == Merge::kGateUp ? ".gate_up_proj" : ".down_proj"));
      return;
    }
    for (std::size_t i = 0; i < merged.size(); ++i) {
      if (part != AdaptedParameter::kFused && static_cast<std::size_t>(part) != i) continue;
      const auto name =
          factor_prefix(base, base.tensors[merged[i]].name).substr(kPeftPrefix.size());
      if (names == ExpertNames::kTogether && is_parameter(base, of, last_name(name))) {
        parameters.insert(name + ".weight");
      } else {
        linear.insert(name);
      }
    }
  }

 private:
  // Routers are no linear layers to transformers 5. In a model with experts PEFT takes modules of
  // these names for those that experts had in transformers 4
  // (peft/utils/transformers_weight_conversion.py, _MOE_TARGET_MODULE_MAPPING).
  static bool is_parameter(const ModelMap& base, const MegatronTensor& of, std::string_view name) {
    constexpr std::array<std::string_view, 3> kOfExperts{"gate_proj", "up_proj", "down_proj"};
    if (of.key.find(".router.") != of.key.npos) return true;
    return base.config.num_moe_experts > 0 &&
           std::ranges::find(kOfExperts, name) != kOfExperts.end();
  }
};

// A setting of modules: what most of them have, and a pattern for each other one.
class Usual {
 public:
  void add(const std::string& module, const ordered_json& value) {
    ++counts_[value];
    values_[module] = value;
  }

  const ordered_json& usual() const {
    return std::ranges::max_element(counts_, {}, [](const auto& one) { return one.second; })->first;
  }

  ordered_json others() const {
    auto patterns = ordered_json::object();
    for (const auto& [module, value] : values_)
      if (value != usual()) patterns[module] = value;
    return patterns;
  }

 private:
  std::map<ordered_json, std::int64_t> counts_;
  std::map<std::string, ordered_json> values_;
};

void require_one_rank_and_alpha(const Adapter& adapter,
                                const ModelMap& base,
                                std::string_view who) {
  for (std::size_t i = 0; i < adapter.adapted.size(); ++i) {
    const auto& one = adapter.adapted[i];
    const auto rank = adapter.adapted.front().rank;
    require(one.rank == rank && adapter.scaling[i] == adapter.scaling.front(), ErrorKind::kLayout,
            "{}: has rank {} and the factor {}, others {} and {}: {} one rank and one alpha",
            base.megatron[one.megatron].key, one.rank, adapter.scaling[i], rank,
            adapter.scaling.front(), who);
  }
}

}  // namespace

std::string peft_config(const Adapter& adapter, const ModelMap& base, ExpertNames experts) {
  const auto is_expert = [&](const AdaptedParameter& one) {
    return base.megatron[one.megatron].expert.has_value();
  };
  const bool as_found =
      adapter.experts == experts || std::ranges::none_of(adapter.adapted, is_expert);
  if (!adapter.config.empty() && as_found && experts == ExpertNames::kTogether)
    return adapter.config;
  PeftModules adapted;
  PeftModules all;
  Usual ranks;
  Usual alphas;
  for (std::size_t i = 0; i < adapter.adapted.size(); ++i) {
    const auto& one = adapter.adapted[i];
    PeftModules here;
    here.add(base, base.megatron[one.megatron], one.part, experts);
    for (auto* names : {&here.linear, &here.parameters}) {
      for (const auto& name : *names) {
        ranks.add(name, one.rank);
        alphas.add(name, as_number(alpha_of(adapter, i)));
      }
    }
    adapted.linear.merge(here.linear);
    adapted.parameters.merge(here.parameters);
  }
  for (const auto& one : adapter.tower) {
    const auto name = one.prefix.substr(kPeftPrefix.size());
    adapted.linear.insert(name);
    ranks.add(name, one.rank);
    alphas.add(name, as_number(static_cast<double>(one.scaling) * static_cast<double>(one.rank)));
  }
  for (const auto& tensor : base.megatron) {
    if (tensor.shape.rank() == 2) all.add(base, tensor, AdaptedParameter::kFused, experts);
  }
  // Modules of a tower may end in the same names.
  const bool is_seeing = !base.family->names->carried.empty();
  ordered_json config{
      {"peft_type", "LORA"},
      {"task_type", adapter.task_type},
      {"base_model_name_or_path", nullptr},
      {"bias", "none"},
      {"fan_in_fan_out", false},
      {"inference_mode", true},
      {"init_lora_weights", true},
      {"lora_alpha", alphas.usual()},
      {"lora_dropout", 0.0},
      {"modules_to_save", nullptr},
      {"r", ranks.usual()},
      {"rank_pattern", ranks.others()},
      {"alpha_pattern", alphas.others()},
      {"target_modules", targets(adapted.linear, all.linear, is_seeing ? kWhole : 1)},
      {"use_dora", false},
      {"use_rslora", false}};
  if (!adapted.parameters.empty())
    config["target_parameters"] = targets(adapted.parameters, all.parameters, 3);
  if (!adapter.config.empty()) {
    const auto found = distckpt::parse_ordered_json(adapter.config, kAdapterConfig);
    for (const auto* key : {"task_type", "base_model_name_or_path", "revision"})
      if (found.contains(key)) config[key] = found.at(key);
  }
  return config.dump(2) + "\n";
}

void require_servable(const Adapter& adapter, const ModelMap& base) {
  require(
      adapter.tower.empty(), ErrorKind::kLayout,
      "{}: is of a vision tower; of an adapter vLLM and SGLang take the language model's factors",
      adapter.tower.empty() ? "" : adapter.tower.front().prefix);
  require_one_rank_and_alpha(adapter, base, "vLLM and SGLang take");
  for (const auto& tensor : adapter.checkpoint.tensors) {
    const std::string_view name = tensor.name;
    const bool factor = name.find(".lora_A.") != name.npos || name.find(".lora_B.") != name.npos;
    require(factor, ErrorKind::kLayout,
            "{}: is no factor of a linear layer; of an adapter vLLM and SGLang take those alone",
            name);
  }
  std::map<std::string, std::set<bool>> projections;  // by layer: gate and up, down
  for (const auto& one : adapter.adapted) {
    const auto& of = base.megatron[one.megatron];
    if (of.expert)
      projections[experts_prefix(base, base.tensors[of.parts.front().model].name)].insert(
          of.merge == Merge::kGateUp);
  }
  for (const auto& [experts, found] : projections) {
    require(found.size() == 2, ErrorKind::kLayout,
            "{}: {} adapted; vLLM takes gate, up and down of an expert together", experts,
            *found.begin() ? "gate and up alone are" : "down alone is");
  }
}

std::string run_config(const Adapter& adapter, const ModelMap& base) {
  require_one_rank_and_alpha(adapter, base, "an adapter of Megatron-Bridge has");
  const bool experts = std::ranges::any_of(adapter.adapted, [&](const auto& one) {
    return base.megatron[one.megatron].expert.has_value();
  });
  std::string text = "peft:\n";
  text += fmt::format("  _target_: megatron.bridge.peft.{}\n",
                      adapter.canonical ? "canonical_lora.CanonicalLoRA" : "lora.LoRA");
  text += "  target_modules:\n";
  for (const auto& module : target_modules(adapter, base)) {
    const auto* const quote = module.starts_with('*') ? "'" : "";
    text += fmt::format("  - {}{}{}\n", quote, module, quote);
  }
  text += fmt::format("  dim: {}\n  alpha: {}\n  dropout: 0.0\n", adapter.adapted.front().rank,
                      as_number(alpha_of(adapter, 0)).dump());
  if (experts) text += "  share_expert_adapters: false\n";
  return text;
}

std::string verl_record(const Adapter& adapter) {
  ordered_json record{{"r", nullptr}, {"lora_alpha", nullptr}, {"task_type", adapter.task_type}};
  if (adapter.config.empty()) {
    record["r"] = adapter.adapted.front().rank;
    record["lora_alpha"] = as_number(alpha_of(adapter, 0));
  } else {
    const auto config = distckpt::parse_ordered_json(adapter.config, kAdapterConfig);
    for (const auto* key : {"r", "lora_alpha"}) record[key] = config.at(key);
  }
  return record.dump() + "\n";
}

}  // namespace ferry::converter
