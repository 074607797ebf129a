// Contradictions between keys, each a rule with a name.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "trainer/config/config_table.h"
#include "trainer/config/sft_config.h"

namespace ferry::trainer {

struct ConfigRule {
  std::string_view name{};
  std::vector<std::string_view> keys{};  // that it is about
  bool (*holds)(const SftConfig&) = nullptr;
  std::string_view says{};  // what is wrong where it does not
};
std::span<const ConfigRule> sft_rules();

// Throws Error(kUsage) of the first rule that does not hold: its name, what is wrong, and each of
// its keys with its value and the line that set it.
void require_consistent(const SftConfig& config, const ConfigTable& table);

}  // namespace ferry::trainer
