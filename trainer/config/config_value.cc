// The one file that knows toml++.
#define TOML_HEADER_ONLY 1
#include "trainer/config/config_value.h"

#include <fmt/format.h>
#include <toml++/toml.h>

#include <algorithm>
#include <cctype>
#include <cmath>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"

namespace ferry::trainer {
namespace {

constexpr std::int64_t kLargestFile = 1 << 20;

// A basic string: TOML's own escapes, nothing else.
std::string quote(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (byte < 0x20 || byte == 0x7f) {
      quoted += fmt::format("\\u{:04x}", byte);
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}

std::string print(bool value) {
  return value ? "true" : "false";
}
std::string print(std::int64_t value) {
  return fmt::format("{}", value);
}
std::string print(double value) {
  auto text = fmt::format("{}", value);  // the shortest that reads back to the same
  const bool is_float = !std::isfinite(value) || text.find_first_of(".e") != std::string::npos;
  return is_float ? text : text + ".0";
}
std::string print(const std::string& value) {
  return quote(value);
}
std::string print(const ConfigValue::List& values) {
  std::string text;
  for (const auto& value : values) text += (text.empty() ? "" : ", ") + to_toml(value);
  return fmt::format("[{}]", text);
}
std::string print(const ConfigValue::Table& values) {
  const auto is_bare = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '-';
  };
  std::string text;
  for (const auto& [name, value] : values) {
    const bool bare = !name.empty() && std::ranges::all_of(name, is_bare);
    text += fmt::format("{}{} = {}", text.empty() ? "" : ", ", bare ? name : quote(name),
                        to_toml(value));
  }
  return fmt::format("{{{}}}", text);
}

using Lines = std::vector<std::string_view>;

Lines lines_of(std::string_view text) {
  Lines lines;
  for (std::size_t begin = 0; begin <= text.size();) {
    const auto end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

std::string line_of(const std::string& source, const toml::source_region& region) {
  return fmt::format("{}:{}", source, region.begin.line);
}

// The number as it is written where its bars are not those between thousands: TOML passes over
// them, but verl's "0.5_2" is two numbers.
std::optional<std::string> barred_number(const toml::node& node, const Lines& lines) {
  const auto& begin = node.source().begin;
  if (begin.line == 0 || begin.line > lines.size()) return std::nullopt;
  const auto line = lines[begin.line - 1];
  if (begin.column == 0 || begin.column > line.size()) return std::nullopt;
  auto text = line.substr(begin.column - 1);
  text = text.substr(0, text.find_first_not_of("0123456789.+-_eE"));
  for (auto bar = text.find('_'); bar != text.npos; bar = text.find('_', bar + 1)) {
    const auto group =
        text.substr(bar + 1, text.find_first_not_of("0123456789", bar + 1) - bar - 1);
    if (group.size() != 3 || text.find('.') < bar) return std::string(text);
  }
  return std::nullopt;
}

ConfigValue value_of(const toml::node& node,
                     const std::string& where,
                     const std::string& key,
                     const Lines& lines) {
  if (node.is_number())
    if (auto text = barred_number(node, lines)) return {std::move(*text)};
  if (const auto* value = node.as_boolean()) return {value->get()};
  if (const auto* value = node.as_integer()) return {value->get()};
  if (const auto* value = node.as_floating_point()) return {value->get()};
  if (const auto* value = node.as_string()) return {value->get()};
  if (const auto* table = node.as_table()) {
    ConfigValue::Table values;
    for (const auto& [name, one] : *table)
      values[std::string(name.str())] = value_of(one, where, key, lines);
    return {std::move(values)};
  }
  const auto* array = node.as_array();
  require(array != nullptr, ErrorKind::kUsage,
          "{}: {}: is neither text, number, true, false nor a list of those", where, key);
  ConfigValue::List list;
  for (const auto& item : *array) {
    require(!item.is_table(), ErrorKind::kUsage, "{}: {}: is a list of tables", where, key);
    list.push_back(value_of(item, where, key, lines));
  }
  return {std::move(list)};
}

ConfigEntry entry_of(const std::string& key, const std::string& where, ConfigValue value) {
  if (value == ConfigValue{std::string(kNullText)})
    return {.key = key, .where = where, .value = ConfigNull{}};
  return {.key = key, .where = where, .value = std::move(value)};
}

void collect(const toml::table& table,
             const std::string& source,
             const std::string& prefix,
             const Lines& lines,
             std::vector<ConfigEntry>& entries) {
  for (const auto& [name, node] : table) {
    const auto key = prefix + std::string(name.str());
    const auto where = line_of(source, node.source());
    const auto* section = node.as_table();
    if (section == nullptr) {
      entries.push_back(entry_of(key, where, value_of(node, where, key, lines)));
    } else if (section->empty()) {
      entries.push_back({.key = key, .where = where});
    } else {
      collect(*section, source, key + ".", lines, entries);
    }
  }
}

}  // namespace

std::string to_toml(const ConfigValue& value) {
  return std::visit([](const auto& one) { return print(one); }, value.value);
}

std::vector<ConfigEntry> read_toml(const std::filesystem::path& path) {
  const auto source = path.string();
  const auto text = distckpt::read_text(path, kLargestFile);
  try {
    std::vector<ConfigEntry> entries;
    collect(toml::parse(text, source), source, "", lines_of(text), entries);
    return entries;
  } catch (const toml::parse_error& error) {
    fail(ErrorKind::kUsage, "{}: {}", line_of(source, error.source()), error.description());
  }
}

ConfigEntry parse_override(std::string_view text) {
  for (int i = 0; i < 2 && text.starts_with('+'); ++i) text.remove_prefix(1);  // Hydra's
  const auto equals = text.find('=');
  require(equals != std::string_view::npos && equals > 0, ErrorKind::kUsage,
          "{}: is no key=value, such as optim.lr=1e-5", text);
  const std::string key(text.substr(0, equals)), where = "the command line";
  const std::string value(text.substr(equals + 1));
  try {
    const auto line = "value = " + value;
    const auto parsed = toml::parse(line);
    require(parsed.size() == 1, ErrorKind::kUsage, "{}: has more than one line", text);
    return entry_of(key, where, value_of(*parsed.get("value"), where, key, {line}));
  } catch (const toml::parse_error&) {
    if (value == "True" || value == "False") return entry_of(key, where, {value == "True"});
    return entry_of(key, where, {value});
  }
}

std::vector<ConfigEntry> read_entries(const std::filesystem::path& file,
                                      const std::vector<std::string>& overrides) {
  std::vector<ConfigEntry> entries;
  if (!file.empty()) entries = read_toml(file);
  for (const auto& text : overrides) entries.push_back(parse_override(text));
  return entries;
}

}  // namespace ferry::trainer
