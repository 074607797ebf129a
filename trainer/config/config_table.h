// The fields of option structs, as one list each. Reading, printing, documenting and suggesting all
// go by that list, so that a name stands in one place:
//   table.section("optim", "The optimizer");
//   table.add("lr", config.lr, "learning rate after the warm-up", above(0));
//   table.add("resume_mode", config.resume_mode, "go on, or begin anew");  // one of its names
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "trainer/config/choice.h"
#include "trainer/config/config_value.h"

namespace ferry::trainer {

// A condition on a value besides its type; on a list, on each of its members.
struct ConfigLimit {
  std::string words{};  // "above 0"; "" for any
  std::function<bool(const ConfigValue&)> holds{};
  std::vector<std::string> choices{};  // where it is one of a few texts
};
ConfigLimit any_value();
ConfigLimit at_least(double least);
ConfigLimit above(double bound);
ConfigLimit above_to(double bound, double most);
ConfigLimit from_to(double least, double most);
ConfigLimit from_below(double least, double bound);  // bound is not one of them
ConfigLimit one_of(const std::vector<std::string>& choices);
ConfigLimit or_auto(ConfigLimit limit);  // also "auto"
inline const ConfigValue kAutoValue{std::string("auto")};

// The text of a type of C++: what it is called, and both ways. read() gives nothing for a value
// of another type.
template <typename T>
struct ConfigType;

template <>
struct ConfigType<bool> {
  static std::string name() { return "true or false"; }
  static std::optional<bool> read(const ConfigValue& value);
  static ConfigValue write(bool value) { return {value}; }
};
template <>
struct ConfigType<std::int64_t> {
  static std::string name() { return "an integer"; }
  static std::optional<std::int64_t> read(const ConfigValue& value);
  static ConfigValue write(std::int64_t value) { return {value}; }
};
template <>
struct ConfigType<int> {
  static std::string name() { return "an integer"; }
  static std::optional<int> read(const ConfigValue& value);
  static ConfigValue write(int value) { return {std::int64_t{value}}; }
};
template <>
struct ConfigType<double> {
  static std::string name() { return "a number"; }
  static std::optional<double> read(const ConfigValue& value);
  static ConfigValue write(double value) { return {value}; }
};
template <>
struct ConfigType<std::string> {
  static std::string name() { return "text"; }
  static std::optional<std::string> read(const ConfigValue& value);
  static ConfigValue write(const std::string& value) { return {value}; }
};
// A section whose keys the run does not know: a whole table, or key by key below its name.
template <>
struct ConfigType<ConfigValue::Table> {
  static std::string name() { return "a table"; }
  static std::optional<ConfigValue::Table> read(const ConfigValue& value);
  static ConfigValue write(const ConfigValue::Table& value) { return {value}; }
};
// One value stands for a list of it.
template <typename T>
struct ConfigType<std::vector<T>> {
  static std::string name() { return "a list, each " + ConfigType<T>::name(); }
  static std::optional<std::vector<T>> read(const ConfigValue& value) {
    const auto* list = std::get_if<ConfigValue::List>(&value.value);
    std::vector<T> result;
    for (const auto& item : list != nullptr ? *list : ConfigValue::List{value}) {
      const auto one = ConfigType<T>::read(item);
      if (!one) return std::nullopt;
      result.push_back(*one);
    }
    return result;
  }
  static ConfigValue write(const std::vector<T>& values) {
    ConfigValue::List list;
    for (const auto& value : values) list.push_back(ConfigType<T>::write(value));
    return {std::move(list)};
  }
};

template <Choice T>
struct ConfigType<T> {
  static std::string name() { return "text"; }
  static std::optional<T> read(const ConfigValue& value) {
    const auto* text = std::get_if<std::string>(&value.value);
    const auto found = text == nullptr ? kChoices<T>.end()
                                       : std::ranges::find(kChoices<T>, *text, &Named<T>::name);
    return found == kChoices<T>.end() ? std::nullopt : std::optional(found->value);
  }
  static ConfigValue write(const T& value) { return {name_of(value)}; }
};

// The limit of a field that is given none: of a choice its names, else any value.
template <typename T>
struct UsualLimit {
  static ConfigLimit limit() {
    if constexpr (Choice<T>)
      return one_of(names_of(kChoices<T>));
    else
      return any_value();
  }
};
template <typename T>
struct UsualLimit<std::vector<T>> : UsualLimit<T> {};

class ConfigTable {
 public:
  // Fields that follow are of this section.
  void section(std::string name, std::string help);

  // A name of before, which is taken for the field's.
  void former(std::string key, std::string now);

  // `value` holds the default, and must outlive the table. An optional that holds nothing is not
  // set.
  template <typename T>
  void add(std::string_view name,
           T& value,
           const std::string& help,
           const ConfigLimit& limit = UsualLimit<T>::limit()) {
    add_field(
        name, ConfigType<T>::name(), help, limit,
        [&value](const ConfigValue* given) {
          auto parsed = given == nullptr ? std::nullopt : ConfigType<T>::read(*given);
          if (parsed) value = std::move(*parsed);
          return parsed.has_value();
        },
        [&value] { return std::optional(ConfigType<T>::write(value)); });
  }
  template <typename T>
  void add(std::string_view name,
           std::optional<T>& value,
           const std::string& help,
           const ConfigLimit& limit = UsualLimit<T>::limit()) {
    add_field(
        name, ConfigType<T>::name(), help, limit,
        [&value](const ConfigValue* given) {
          auto parsed = given == nullptr ? std::nullopt : ConfigType<T>::read(*given);
          if (given == nullptr || parsed) value = std::move(parsed);
          return given == nullptr || value.has_value();
        },
        [&value] { return value ? std::optional(ConfigType<T>::write(*value)) : std::nullopt; });
  }

  // The same, where the plan of a run decides what is not set (trainer/plan/auto_settings.h): that
  // is written "auto".
  template <typename T>
  void add_auto(std::string_view name,
                std::optional<T>& value,
                const std::string& help,
                const ConfigLimit& limit = UsualLimit<T>::limit()) {
    add_field(
        name, "auto or " + ConfigType<T>::name(), help, or_auto(limit),
        [&value](const ConfigValue* given) {
          if (given == nullptr || *given == kAutoValue)
            value.reset();
          else if (auto parsed = ConfigType<T>::read(*given))
            value = std::move(parsed);
          else
            return false;
          return true;
        },
        [&value] { return std::optional(value ? ConfigType<T>::write(*value) : kAutoValue); });
  }

  // The same of a list that may also stand in one text, separated by commas, as verl writes it.
  template <typename T>
  void add_separated(std::string_view name,
                     std::vector<T>& values,
                     const std::string& help,
                     const ConfigLimit& limit = UsualLimit<T>::limit()) {
    add(name, values, help, limit);
    fields_.back().separated = true;
  }

  // The same of a path, or of a list of them: `~/` at its beginning is the folder of the user.
  template <typename T>
  void add_path(std::string_view name, T& value, const std::string& help) {
    add(name, value, help);
    fields_.back().is_path = true;
  }

  // Sets the field that an entry names. null gives a field its default back, as if nobody had set
  // it; of one that may hold nothing it takes the value away. Throws Error(kUsage)
  // "<where>: <key>: ...", with the nearest key as a hint where there is none of that name.
  void set(const ConfigEntry& entry);

  // Sets them one by one. Throws the same, and says of all entries without a key at once.
  void set_all(const std::vector<ConfigEntry>& entries);

  // Sets what nobody did of section `to` to what was set under the same name in section `from`, of
  // the names that `takes` holds for.
  void inherit(std::string_view to,
               std::string_view from,
               const std::function<bool(std::string_view name)>& takes);

  // Writes "null" for what section `to` leaves unset and section `from` sets: it is not inherited.
  void write_unset(std::string_view to, std::string_view from);

  // The keys of a section, or the one key of that name, that somebody gave another value than the
  // default, and one that is something: neither 0, false nor empty. Inherited values are not among
  // them.
  std::vector<std::string> changed(std::string_view section_or_key) const;

  // "optim.lr = 0.1 (run.toml:12)"; of a field that nobody set, "optim.lr = 1e-05 (the default)".
  std::string describe(std::string_view key) const;

  ConfigValues values() const;   // of every field
  std::string toml() const;      // every field, its help beside it; reads back to the same
  std::string markdown() const;  // a table per section: key, default, meaning

 private:
  struct Field {
    std::string key{};
    std::string type{};
    std::string help{};
    ConfigLimit limit{};
    // nullptr: take the value away; false: a value of another type, or none where there has to be
    // one
    std::function<bool(const ConfigValue*)> set{};
    std::function<std::optional<ConfigValue>()> get{};
    std::optional<ConfigValue> usual{};  // the default
    bool separated = false;
    bool is_path = false;
    bool is_inherited = false;
    bool written_unset = false;  // "null" where it holds nothing
    std::string where{};         // it was set; "" if it was not
  };
  struct Section {
    std::string name{};
    std::string help{};
    std::size_t first_field = 0;
  };

  void add_field(std::string_view name,
                 std::string type,
                 std::string help,
                 ConfigLimit limit,
                 std::function<bool(const ConfigValue*)> set,
                 std::function<std::optional<ConfigValue>()> get);
  const Field& at(std::string_view key) const;
  void require_limit(const Field& field, const ConfigEntry& entry, const ConfigValue& value) const;
  // Sets what an entry names within a field that is a table. False: there is none of that name.
  bool set_within_table(const ConfigEntry& entry);
  bool try_set(const ConfigEntry& entry);  // false: there is no such key
  // The advice for a key that is none, or "".
  std::string hint_for(const ConfigEntry& entry) const;
  // Calls with each section and its fields.
  template <typename Visit>
  void visit_sections(Visit&& visit) const;

  std::vector<Section> sections_;
  std::vector<Field> fields_;
  std::map<std::string, std::size_t, std::less<>> index_;  // of fields_, by key
  std::map<std::string, std::string, std::less<>> former_;
};

// "lr" of "critic.optim.lr".
std::string_view last_name(std::string_view key);

}  // namespace ferry::trainer
