// Contradictions between keys, each a rule with a name. A section's rules are written once, over
// its struct, and hold wherever the section stands:
//   add_rules(rules, optim_rules(), "critic.optim", [](const PpoConfig& c) -> auto& { ... });
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "trainer/config/config_table.h"

namespace ferry::trainer {

template <typename Config>
struct ConfigRule {
  std::string name{};
  std::vector<std::string> keys{};  // that it is about; ".lr" is one of the rule's own section
  std::function<bool(const Config&)> holds{};
  std::string says{};  // what is wrong where it does not
};

template <typename Config>
using ConfigRules = std::vector<ConfigRule<Config>>;

// The rules of a section for the one that stands at `section`; `get` takes it out of the whole.
template <typename Config, typename Section, typename Get>
void add_rules(ConfigRules<Config>& rules,
               const ConfigRules<Section>& section_rules,
               const std::string& section,
               Get get) {
  for (const auto& rule : section_rules) {
    auto keys = rule.keys;
    for (auto& key : keys) key = key.starts_with('.') ? section + key : key;
    const auto holds = [of_section = rule.holds, get](const Config& c) {
      return of_section(get(c));
    };
    rules.push_back({.name = rule.name, .keys = keys, .holds = holds, .says = rule.says});
  }
}

// Throws Error(kUsage) of the first rule that does not hold: its name, what is wrong, and each of
// its keys with its value and the line that set it.
template <typename Config>
void require_consistent(const Config& config,
                        const ConfigRules<Config>& rules,
                        const ConfigTable& table) {
  for (const auto& rule : rules) {
    if (rule.holds(config)) continue;
    Error error(ErrorKind::kUsage, fmt::format("configuration: {} [{}]", rule.says, rule.name));
    for (const auto& key : rule.keys) error.add_context("reading " + table.describe(key));
    throw error;
  }
}

}  // namespace ferry::trainer
