#include "converter/adapter/adapter_files.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "converter/adapter/lora_settings.h"
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

// Modules by their last name where the base has no other of that name, else whole. `of_all` counts
// the base's modules by their last name.
std::vector<std::string> targets(const std::set<std::string>& modules,
                                 const std::map<std::string, std::int64_t>& of_all,
                                 std::size_t names_kept) {
  std::map<std::string, std::vector<std::string>> by_name;
  for (const auto& module : modules) by_name[last_name(module)].push_back(module);
  std::vector<std::string> listed;
  for (const auto& [name, those] : by_name) {
    if (std::ssize(those) < of_all.at(name)) {
      listed.insert(listed.end(), those.begin(), those.end());
      continue;
    }
    auto at = those.front().size();
    for (std::size_t i = 0; i < names_kept; ++i) at = those.front().rfind('.', at - 1);
    listed.push_back(those.front().substr(at + 1));
  }
  return listed;
}

// The modules that PEFT adapts, by name: linear layers, and parameters of experts.
struct PeftModules {
  std::set<std::string> linear{};
  std::set<std::string> experts{};

  void add(const ModelMap& base, const MegatronTensor& of, int part) {
    const auto merged = merged_tensors(of);
    if (of.expert) {
      const auto name =
          experts_prefix(base.tensors[merged.front()].name).substr(kPeftPrefix.size());
      experts.insert(name + (of.merge == Merge::kGateUp ? ".gate_up_proj" : ".down_proj"));
      return;
    }
    for (std::size_t i = 0; i < merged.size(); ++i) {
      if (part != AdaptedParameter::kFused && static_cast<std::size_t>(part) != i) continue;
      linear.insert(factor_prefix(base.tensors[merged[i]].name).substr(kPeftPrefix.size()));
    }
  }
};

std::map<std::string, std::int64_t> count_names(const std::set<std::string>& modules) {
  std::map<std::string, std::int64_t> counts;
  for (const auto& module : modules) ++counts[last_name(module)];
  return counts;
}

}  // namespace

std::string peft_config(const Adapter& adapter, const ModelMap& base) {
  PeftModules adapted;
  PeftModules all;
  std::map<std::int64_t, std::int64_t> ranks;
  for (const auto& one : adapter.adapted) {
    adapted.add(base, base.megatron[one.megatron], one.part);
    ++ranks[one.rank];
  }
  for (const auto& tensor : base.megatron) {
    if (tensor.shape.rank() == 2) all.add(base, tensor, AdaptedParameter::kFused);
  }
  const auto usual =
      std::ranges::max_element(ranks, {}, [](const auto& one) { return one.second; })->first;
  ordered_json rank_pattern = ordered_json::object();
  for (const auto& one : adapter.adapted) {
    if (one.rank == usual) continue;
    PeftModules here;
    here.add(base, base.megatron[one.megatron], one.part);
    for (const auto* names : {&here.linear, &here.experts}) {
      for (const auto& name : *names) rank_pattern[name] = one.rank;
    }
  }
  ordered_json config{{"peft_type", "LORA"},
                      {"task_type", "CAUSAL_LM"},
                      {"base_model_name_or_path", nullptr},
                      {"bias", "none"},
                      {"fan_in_fan_out", false},
                      {"inference_mode", true},
                      {"init_lora_weights", true},
                      {"lora_alpha", as_number(alpha_of(adapter, 0))},
                      {"lora_dropout", 0.0},
                      {"modules_to_save", nullptr},
                      {"r", usual},
                      {"rank_pattern", rank_pattern},
                      {"alpha_pattern", ordered_json::object()},
                      {"target_modules", targets(adapted.linear, count_names(all.linear), 1)},
                      {"use_dora", false},
                      {"use_rslora", false}};
  if (!adapted.experts.empty())
    config["target_parameters"] = targets(adapted.experts, count_names(all.experts), 3);
  return config.dump(2) + "\n";
}

std::string run_config(const Adapter& adapter, const ModelMap& base) {
  const auto rank = adapter.adapted.front().rank;
  std::set<std::string> modules;
  bool experts = false;
  for (std::size_t i = 0; i < adapter.adapted.size(); ++i) {
    const auto& one = adapter.adapted[i];
    const auto& of = base.megatron[one.megatron];
    require(
        one.rank == rank && adapter.scaling[i] == adapter.scaling.front(), ErrorKind::kLayout,
        "{}: has rank {} and the factor {}, others {} and {}: an adapter of Megatron-Bridge has "
        "one rank and one alpha",
        of.key, one.rank, adapter.scaling[i], rank, adapter.scaling.front());
    experts = experts || of.expert.has_value();
    auto module = of.key.substr(0, of.key.rfind('.'));
    module = last_name(module);
    constexpr std::array<std::string_view, 3> kQkv{"linear_q", "linear_k", "linear_v"};
    constexpr std::array<std::string_view, 2> kGateUp{"linear_fc1_gate", "linear_fc1_up"};
    if (one.part != AdaptedParameter::kFused) {
      const auto part = static_cast<std::size_t>(one.part);
      module = of.merge == Merge::kQkvGroups ? kQkv.at(part) : kGateUp.at(part);
    }
    modules.insert(module);
  }
  std::string text = "peft:\n";
  text += fmt::format("  _target_: megatron.bridge.peft.{}\n",
                      adapter.canonical ? "canonical_lora.CanonicalLoRA" : "lora.LoRA");
  text += "  target_modules:\n";
  for (const auto& module : modules) text += fmt::format("  - {}\n", module);
  text += fmt::format("  dim: {}\n  alpha: {}\n  dropout: 0.0\n", rank,
                      as_number(alpha_of(adapter, 0)).dump());
  if (experts) text += "  share_expert_adapters: false\n";
  return text;
}

std::string verl_record(const Adapter& adapter) {
  ordered_json record{{"r", nullptr}, {"lora_alpha", nullptr}, {"task_type", "CAUSAL_LM"}};
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
