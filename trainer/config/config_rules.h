// Contradictions between keys, each a rule with a name. A section's rules are written once, over
// its struct, and hold wherever the section stands:
//   add_rules(rules, optim_rules(), "critic.optim", [](const PpoConfig& c) -> auto& { ... });
#pragma once

#include <fmt/ranges.h>

#include <functional>
#include <string>
#include <utility>
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

// The keys as the whole has them: ".lr" is one of `section`.
inline std::vector<std::string> keys_of(const std::string& section, std::vector<std::string> keys) {
  for (auto& key : keys) key = key.starts_with('.') ? section + key : key;
  return keys;
}

// The rules of a section for the one that stands at `section`; `get` takes it out of the whole.
template <typename Config, typename Section, typename Get>
void add_rules(ConfigRules<Config>& rules,
               const ConfigRules<Section>& section_rules,
               const std::string& section,
               Get get) {
  for (const auto& rule : section_rules) {
    const auto holds = [of_section = rule.holds, get](const Config& c) {
      return of_section(get(c));
    };
    rules.push_back({.name = rule.name,
                     .keys = keys_of(section, rule.keys),
                     .holds = holds,
                     .says = rule.says});
  }
}

// Keys that do nothing in some runs.
template <typename Config>
struct Ineffective {
  std::vector<std::string> keys{};  // or whole sections; ".min_lr" as above
  std::function<bool(const Config&)> has_effect{};
  std::string because{};  // what they lack where it does not hold
  bool is_error = false;  // else a note: scripts set keys beside what switches them off
};

template <typename Config>
using IneffectiveKeys = std::vector<Ineffective<Config>>;

template <typename Config, typename Section, typename Get>
void add_ineffective(IneffectiveKeys<Config>& all,
                     const IneffectiveKeys<Section>& of_section,
                     const std::string& section,
                     Get get) {
  for (const auto& one : of_section) {
    const auto has_effect = [of = one.has_effect, get](const Config& c) { return of(get(c)); };
    all.push_back({.keys = keys_of(section, one.keys),
                   .has_effect = has_effect,
                   .because = one.because,
                   .is_error = one.is_error});
  }
}

// A line for each of the keys that were set and have no effect. Throws Error(kUsage) of the first
// that is an error.
template <typename Config>
std::vector<std::string> find_ineffective(const Config& config,
                                          const IneffectiveKeys<Config>& all,
                                          const ConfigTable& table) {
  std::vector<std::string> notes;
  for (const auto& one : all) {
    if (one.has_effect(config)) continue;
    std::vector<std::string> set;
    for (const auto& key : one.keys) {
      for (auto& changed : table.changed(key)) set.push_back(std::move(changed));
    }
    if (set.empty()) continue;
    const auto line = fmt::format("{}: no effect: {}", fmt::join(set, ", "), one.because);
    notes.push_back("note       " + line);
    if (!one.is_error) continue;
    Error error(ErrorKind::kUsage, fmt::format("configuration: {} [no_effect]", line));
    for (const auto& key : set) error.add_context("reading " + table.describe(key));
    throw error;
  }
  return notes;
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
