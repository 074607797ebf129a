// A value of a configuration, as TOML has them: where it came from, and what it is.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace ferry::trainer {

struct ConfigValue {
  using List = std::vector<ConfigValue>;
  using Table = std::map<std::string, ConfigValue>;
  std::variant<bool, std::int64_t, double, std::string, List, Table> value{};
  bool operator==(const ConfigValue&) const = default;
};

// The text that TOML reads back to the same value: true, 3, 1e-05, "a \"b\"", ["a", "b"], {a = 1}.
std::string to_toml(const ConfigValue& value);

// Takes a value away. The command line says null; TOML, which has no such value, the text "null".
struct ConfigNull {};
inline constexpr const char* kNullText = "null";

// Keys of a configuration and their values as TOML; kNullText for what is not set.
using ConfigValues = std::vector<std::pair<std::string, std::string>>;

struct ConfigEntry {
  std::string key{};    // "optim.lr"
  std::string where{};  // "run.toml:12", "the command line"
  // Nothing: a section without a key.
  std::variant<std::monostate, ConfigNull, ConfigValue> value{};
};

// Every key of a file, in the order of its lines. Throws Error(kUsage) "run.toml:12: ...".
std::vector<ConfigEntry> read_toml(const std::filesystem::path& path);

// "optim.lr=1e-5": the value is TOML; what is none is text, so that quotes are seldom needed.
// Before the key + and ++ mean nothing: Hydra's scripts have them before keys that its files lack.
// Throws Error(kUsage).
ConfigEntry parse_override(std::string_view text);

// Entries of a file, if one is named, then of the overrides, which win. Throws Error(kUsage).
std::vector<ConfigEntry> read_entries(const std::filesystem::path& file,
                                      const std::vector<std::string>& overrides);

}  // namespace ferry::trainer
