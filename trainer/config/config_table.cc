#include "trainer/config/config_table.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <ranges>
#include <span>
#include <utility>

#include "distckpt/base/nearest_name.h"
#include "trainer/config/peers/peers_keys.h"

namespace ferry::trainer {
namespace {

std::optional<double> number_of(const ConfigValue& value) {
  if (const auto* integer = std::get_if<std::int64_t>(&value.value))
    return static_cast<double>(*integer);
  if (const auto* number = std::get_if<double>(&value.value)) return *number;
  return std::nullopt;
}

template <typename Holds>
ConfigLimit numeric_limit(const std::string& words, Holds holds) {
  return {.words = words, .holds = [holds](const ConfigValue& value) {
            const auto number = number_of(value);
            return number && std::isfinite(*number) && holds(*number);
          }};
}

// A text, or a list of nothing else.
bool is_text(const ConfigValue& value) {
  if (const auto* list = std::get_if<ConfigValue::List>(&value.value))
    return std::ranges::all_of(*list, is_text);
  return std::holds_alternative<std::string>(value.value);
}

bool is_nothing(const ConfigValue& value) {
  if (const auto number = number_of(value)) return *number == 0;
  if (const auto* flag = std::get_if<bool>(&value.value)) return !*flag;
  if (const auto* text = std::get_if<std::string>(&value.value)) return text->empty();
  if (const auto* list = std::get_if<ConfigValue::List>(&value.value)) return list->empty();
  return std::get<ConfigValue::Table>(value.value).empty();
}

// The members of a text that commas separate, without blanks around them.
ConfigValue list_of(std::string_view text) {
  ConfigValue::List parts;
  for (const auto part : std::views::split(text, ',')) {
    const std::string_view all(part.begin(), part.end());
    const auto begin = all.find_first_not_of(" \t");
    if (begin == all.npos) continue;
    parts.push_back({std::string(all.substr(begin, all.find_last_not_of(" \t") - begin + 1))});
  }
  return {std::move(parts)};
}

// Puts the folder of the user in place of "~" before a slash.
ConfigValue without_tilde(const ConfigValue& value) {
  if (const auto* list = std::get_if<ConfigValue::List>(&value.value)) {
    ConfigValue::List paths;
    for (const auto& item : *list) paths.push_back(without_tilde(item));
    return {std::move(paths)};
  }
  const auto* const text = std::get_if<std::string>(&value.value);
  const auto* const home = std::getenv("HOME");  // NOLINT(concurrency-mt-unsafe)
  if (text == nullptr || home == nullptr || !text->starts_with("~/")) return value;
  return {home + text->substr(1)};
}

// A cell of a table of Markdown.
std::string escape_cell(std::string_view text) {
  std::string escaped;
  for (const char c : text) escaped += c == '|' ? "\\|" : std::string(1, c);
  return escaped;
}

}  // namespace

std::string_view last_name(std::string_view key) {
  return key.substr(key.rfind('.') + 1);  // all of it, where there is no dot
}

ConfigLimit any_value() {
  return {.holds = [](const ConfigValue&) { return true; }};
}
ConfigLimit at_least(double least) {
  return numeric_limit(fmt::format("at least {}", least), [=](double x) { return x >= least; });
}
ConfigLimit above(double bound) {
  return numeric_limit(fmt::format("above {}", bound), [=](double x) { return x > bound; });
}
ConfigLimit above_to(double bound, double most) {
  return numeric_limit(fmt::format("above {} to {}", bound, most),
                       [=](double x) { return x > bound && x <= most; });
}
ConfigLimit from_to(double least, double most) {
  return numeric_limit(fmt::format("from {} to {}", least, most),
                       [=](double x) { return x >= least && x <= most; });
}
ConfigLimit from_below(double least, double bound) {
  return numeric_limit(fmt::format("from {} to below {}", least, bound),
                       [=](double x) { return x >= least && x < bound; });
}
ConfigLimit one_of(const std::vector<std::string>& choices) {
  std::string words;
  for (const auto& choice : choices)
    words += (words.empty() ? "one of " : ", ") + (choice.empty() ? "\"\"" : choice);
  return {.words = words,
          .holds =
              [choices](const ConfigValue& value) {
                const auto* text = std::get_if<std::string>(&value.value);
                return text != nullptr && std::ranges::find(choices, *text) != choices.end();
              },
          .choices = choices};
}

ConfigLimit or_auto(ConfigLimit limit) {
  if (!limit.choices.empty()) {
    limit.choices.insert(limit.choices.begin(), std::get<std::string>(kAutoValue.value));
    return one_of(limit.choices);
  }
  return {.words = limit.words, .holds = [holds = limit.holds](const ConfigValue& value) {
            return value == kAutoValue || holds(value);
          }};
}

std::optional<bool> ConfigType<bool>::read(const ConfigValue& value) {
  const auto* given = std::get_if<bool>(&value.value);
  return given == nullptr ? std::nullopt : std::optional(*given);
}
std::optional<std::int64_t> ConfigType<std::int64_t>::read(const ConfigValue& value) {
  const auto* given = std::get_if<std::int64_t>(&value.value);
  return given == nullptr ? std::nullopt : std::optional(*given);
}
std::optional<int> ConfigType<int>::read(const ConfigValue& value) {
  const auto* given = std::get_if<std::int64_t>(&value.value);
  if (given == nullptr || !std::in_range<int>(*given)) return std::nullopt;
  return static_cast<int>(*given);
}
std::optional<double> ConfigType<double>::read(const ConfigValue& value) {
  return number_of(value);
}
std::optional<std::string> ConfigType<std::string>::read(const ConfigValue& value) {
  const auto* given = std::get_if<std::string>(&value.value);
  return given == nullptr ? std::nullopt : std::optional(*given);
}

std::optional<ConfigValue::Table> ConfigType<ConfigValue::Table>::read(const ConfigValue& value) {
  const auto* given = std::get_if<ConfigValue::Table>(&value.value);
  return given == nullptr ? std::nullopt : std::optional(*given);
}

void ConfigTable::former(std::string key, std::string now) {
  former_.emplace(std::move(key), std::move(now));
}

void ConfigTable::section(std::string name, std::string help) {
  sections_.push_back(
      {.name = std::move(name), .help = std::move(help), .first_field = fields_.size()});
}

void ConfigTable::add_field(std::string_view name,
                            std::string type,
                            std::string help,
                            ConfigLimit limit,
                            std::function<bool(const ConfigValue*)> set,
                            std::function<std::optional<ConfigValue>()> get) {
  const auto key = fmt::format("{}.{}", sections_.back().name, name);
  const bool is_new = index_.emplace(key, fields_.size()).second;
  require(is_new, ErrorKind::kBug, "{}: is listed twice", key);
  fields_.push_back({.key = key,
                     .type = std::move(type),
                     .help = std::move(help),
                     .limit = std::move(limit),
                     .set = std::move(set),
                     .get = get,
                     .usual = get()});
}

const ConfigTable::Field& ConfigTable::at(std::string_view key) const {
  const auto found = index_.find(key);
  require(found != index_.end(), ErrorKind::kBug, "{}: is no key", key);
  return fields_[found->second];
}

std::string ConfigTable::hint_for(const ConfigEntry& entry) const {
  if (auto hint = hint_for_peers_key(
          entry.key, [this](const std::string& key) { return index_.contains(key); }))
    return *std::move(hint);
  // The same name in another section, as peers sort them; else one that is spelt nearly so.
  constexpr auto kOfMany = std::to_array<std::string_view>({"enable", "mode", "path"});
  const auto name = last_name(entry.key);
  const bool is_of_many = std::ranges::find(kOfMany, name) != kOfMany.end();
  std::vector<std::string> elsewhere, alike;
  for (const auto& field : fields_) {
    if (last_name(field.key) == name && !is_of_many) elsewhere.push_back(field.key);
    if (edit_distance(entry.key, field.key) <= std::max<std::size_t>(2, name.size() / 3))
      alike.push_back(field.key);
  }
  const auto& likely = elsewhere.empty() ? alike : elsewhere;
  std::optional<std::string> suggestion;
  if (!likely.empty())
    suggestion = *std::ranges::min_element(
        likely, {}, [&](const std::string& key) { return edit_distance(entry.key, key); });
  return suggestion ? fmt::format("did you mean {}?", *suggestion) : "";
}

void ConfigTable::require_limit(const Field& field,
                                const ConfigEntry& entry,
                                const ConfigValue& value) const {
  if (const auto* list = std::get_if<ConfigValue::List>(&value.value)) {
    for (const auto& item : *list) require_limit(field, entry, item);
    return;
  }
  if (field.limit.holds(value)) return;
  Error error(ErrorKind::kUsage, fmt::format("{}: {}: is {}, but must be {}", entry.where,
                                             entry.key, to_toml(value), field.limit.words));
  if (const auto* text = std::get_if<std::string>(&value.value)) {
    if (const auto hint = hint_for_peers_value(*text))
      error.set_hint(std::string(*hint));
    else if (const auto choice = nearest(*text, field.limit.choices))
      error.set_hint(fmt::format("did you mean {}?", *choice));
  }
  throw error;
}

bool ConfigTable::set_within_table(const ConfigEntry& entry) {
  for (auto& field : fields_) {
    if (!entry.key.starts_with(field.key + '.')) continue;
    auto whole = field.get();
    if (!whole || !std::holds_alternative<ConfigValue::Table>(whole->value)) continue;
    auto* table = &std::get<ConfigValue::Table>(whole->value);
    auto name = entry.key.substr(field.key.size() + 1);
    for (auto dot = name.find('.'); dot != name.npos; dot = name.find('.')) {
      auto& inner = (*table)[name.substr(0, dot)].value;
      if (!std::holds_alternative<ConfigValue::Table>(inner)) inner = ConfigValue::Table{};
      table = &std::get<ConfigValue::Table>(inner);
      name.erase(0, dot + 1);
    }
    if (const auto* value = std::get_if<ConfigValue>(&entry.value))
      (*table)[name] = *value;
    else
      table->erase(name);
    field.set(&*whole);
    field.where = entry.where;
    return true;
  }
  return false;
}

void ConfigTable::set(const ConfigEntry& entry) {
  set_all({entry});
}

void ConfigTable::set_all(const std::vector<ConfigEntry>& entries) {
  std::vector<const ConfigEntry*> unknown;
  for (const auto& entry : entries)
    if (!try_set(entry)) unknown.push_back(&entry);
  if (unknown.empty()) return;
  const auto& first = *unknown.front();
  auto what = fmt::format("{}: {}: there is no such key", first.where, first.key);
  if (unknown.size() == 1) throw Error(ErrorKind::kUsage, what, hint_for(first));
  std::string hints;
  for (const auto* entry : unknown) {
    const auto hint = hint_for(*entry);
    hints += fmt::format("{}{}: {}", hints.empty() ? "" : "\n", entry->key,
                         hint.empty() ? "there is no such key" : hint);
  }
  throw Error(ErrorKind::kUsage, fmt::format("{}, and {} more", what, unknown.size() - 1), hints);
}

bool ConfigTable::try_set(const ConfigEntry& entry) {
  const auto former = former_.find(entry.key);
  const auto found = index_.find(former == former_.end() ? entry.key : former->second);
  const bool is_empty = std::holds_alternative<std::monostate>(entry.value);
  if (found == index_.end()) {
    if (set_within_table(entry)) return true;
    // A section without keys, or one that holds sections.
    return is_empty && std::ranges::any_of(sections_, [&](const Section& section) {
             return (section.name + '.').starts_with(entry.key + '.');
           });
  }
  auto& field = fields_[found->second];
  const ConfigValue nothing{ConfigValue::Table{}};
  if (is_empty && field.set(&nothing)) {  // of a table
    field.where = entry.where;
    return true;
  }
  require(!is_empty, ErrorKind::kUsage, "{}: {}: is a section without keys, {} is expected",
          entry.where, entry.key, field.type);
  const auto* value = std::get_if<ConfigValue>(&entry.value);
  if (value == nullptr) {
    const bool may_hold_nothing = field.set(nullptr);
    if (!may_hold_nothing) field.set(&*field.usual);
    field.where = may_hold_nothing ? entry.where : "";
    return true;
  }
  ConfigValue parts;
  if (field.separated && std::holds_alternative<std::string>(value->value)) {
    parts = list_of(std::get<std::string>(value->value));
    value = &parts;
  }
  if (field.is_path) {
    parts = without_tilde(*value);
    value = &parts;
  }
  if (!field.limit.choices.empty() && is_text(*value))
    require_limit(field, entry, *value);  // says which texts there are
  require(field.set(value), ErrorKind::kUsage, "{}: {}: is {}, {} is expected", entry.where,
          entry.key, to_toml(*value), field.type);
  require_limit(field, entry, *value);
  field.where = entry.where;
  field.is_inherited = false;
  return true;
}

void ConfigTable::inherit(std::string_view to,
                          std::string_view from,
                          const std::function<bool(std::string_view name)>& takes) {
  for (auto& field : fields_) {
    const auto name = last_name(field.key);
    if (!field.where.empty() || field.key != fmt::format("{}.{}", to, name) || !takes(name))
      continue;
    const auto& source = at(fmt::format("{}.{}", from, name));
    if (source.where.empty()) continue;
    const auto value = source.get();
    require(field.set(value ? &*value : nullptr), ErrorKind::kBug, "{}: cannot have what {} has",
            field.key, source.key);
    field.where = fmt::format("as {}, {}", source.key, source.where);
    field.is_inherited = true;
  }
}

void ConfigTable::write_unset(std::string_view to, std::string_view from) {
  for (auto& field : fields_) {
    const auto name = last_name(field.key);
    if (field.key == fmt::format("{}.{}", to, name) && !field.get())
      field.written_unset = at(fmt::format("{}.{}", from, name)).get().has_value();
  }
}

std::vector<std::string> ConfigTable::changed(std::string_view section_or_key) const {
  std::vector<std::string> keys;
  for (const auto& field : fields_) {
    const bool is_meant =
        field.key == section_or_key || field.key.starts_with(fmt::format("{}.", section_or_key));
    const auto value = field.get();
    const bool turned_off = value == ConfigValue{false} && field.usual == ConfigValue{true};
    const bool says_something =
        value && value != field.usual && (turned_off || !is_nothing(*value));
    if (is_meant && says_something && !field.is_inherited) keys.push_back(field.key);
  }
  return keys;
}

std::string ConfigTable::describe(std::string_view key) const {
  const auto& field = at(key);
  const auto value = field.get();
  return fmt::format("{} {} ({})", key, value ? "= " + to_toml(*value) : "is not set",
                     field.where.empty() ? "the default" : field.where);
}

template <typename Visit>
void ConfigTable::visit_sections(Visit&& visit) const {
  for (std::size_t i = 0; i < sections_.size(); ++i) {
    const auto end = i + 1 < sections_.size() ? sections_[i + 1].first_field : fields_.size();
    visit(sections_[i],
          std::span(fields_).subspan(sections_[i].first_field, end - sections_[i].first_field));
  }
}

ConfigValues ConfigTable::values() const {
  ConfigValues all;
  for (const auto& field : fields_) {
    const auto value = field.get();
    all.emplace_back(field.key, value ? to_toml(*value) : kNullText);
  }
  return all;
}

std::string ConfigTable::toml() const {
  constexpr std::size_t kColumn = 44;  // of the help
  std::string text;
  visit_sections([&](const Section& section, std::span<const Field> fields) {
    text += fmt::format("{}# {}\n[{}]\n", text.empty() ? "" : "\n", section.help, section.name);
    for (const auto& field : fields) {
      auto value = field.get();
      if (field.written_unset) value = ConfigValue{std::string(kNullText)};
      const auto name = last_name(field.key);
      const auto line =
          value ? fmt::format("{} = {}", name, to_toml(*value)) : fmt::format("# {} =", name);
      const auto limit = field.limit.words.empty() ? "" : fmt::format(" ({})", field.limit.words);
      text += fmt::format("{}{}  # {}{}\n", line,
                          std::string(kColumn - std::min(kColumn, line.size()), ' '), field.help,
                          limit);
    }
  });
  return text;
}

std::string ConfigTable::markdown() const {
  std::string text;
  visit_sections([&](const Section& section, std::span<const Field> fields) {
    text += fmt::format("{}### {}\n\n{}.\n\n| key | default | |\n|---|---|---|\n",
                        text.empty() ? "" : "\n", section.name, section.help);
    for (const auto& field : fields) {
      const auto value = field.get();
      const auto limit = field.limit.words.empty() ? "" : fmt::format("; {}", field.limit.words);
      text += fmt::format("| `{}` | {} | {}{} |\n", last_name(field.key),
                          value ? fmt::format("`{}`", to_toml(*value)) : "",
                          escape_cell(field.help), limit);
    }
  });
  return text;
}

}  // namespace ferry::trainer
