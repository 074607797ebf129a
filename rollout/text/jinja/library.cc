// Parameters, tests and global functions.
#include "rollout/text/jinja/library.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <map>

#include "rollout/text/unicode/unicode.h"

namespace ferry::rollout::text::jinja {
namespace {

constexpr std::int64_t kLongestRange = 100'000;  // Jinja's sandbox has the same

bool can_iterate(const Value& value) {
  return value.is_string() || value.is_list() || value.is_undefined() ||
         (value.is_dict() && !value.dict().is_namespace);
}
bool is_odd(const Value& value) {
  if (!value.is_int() && !value.is_bool()) fail_template("an odd or even what is no integer");
  return value.integer() % 2 != 0;
}

// x is defined
using Test = bool (*)(const Value& value);
const std::map<std::string_view, Test>& tests() {
  static const std::map<std::string_view, Test> known{
      {"boolean", [](const Value& v) { return v.is_bool(); }},
      {"callable", [](const Value& v) { return v.is_function(); }},
      {"defined", [](const Value& v) { return !v.is_undefined(); }},
      {"even", [](const Value& v) { return !is_odd(v); }},
      {"false", [](const Value& v) { return v.is_bool() && v.integer() == 0; }},
      {"filter", [](const Value& v) { return is_filter(v.str()); }},
      {"float", [](const Value& v) { return v.is_float(); }},
      {"integer", [](const Value& v) { return v.is_int() || v.is_wide_int(); }},
      {"iterable", can_iterate},
      {"lower",
       [](const Value& v) {
         const auto text = v.str();
         return lowercase(text) == text && uppercase(text) != text;
       }},
      {"mapping", [](const Value& v) { return v.is_dict() && !v.dict().is_namespace; }},
      {"none", [](const Value& v) { return v.is_none(); }},
      {"number", [](const Value& v) { return v.is_number() || v.is_wide_int(); }},
      {"odd", is_odd},
      {"sequence", can_iterate},
      {"string", [](const Value& v) { return v.is_string(); }},
      {"test", [](const Value& v) { return is_test(v.str()); }},
      {"true", [](const Value& v) { return v.is_bool() && v.integer() == 1; }},
      {"undefined", [](const Value& v) { return v.is_undefined(); }},
      {"upper",
       [](const Value& v) {
         const auto text = v.str();
         return uppercase(text) == text && lowercase(text) != text;
       }},
  };
  return known;
}

// x is equalto y
using Comparison = bool (*)(const Value& value, const Value& other);
const std::map<std::string_view, Comparison>& comparisons() {
  static constexpr Comparison kEqual = [](const Value& a, const Value& b) { return a == b; };
  static constexpr Comparison kOther = [](const Value& a, const Value& b) { return !(a == b); };
  static constexpr Comparison kLess = [](const Value& a, const Value& b) { return less(a, b); };
  static constexpr Comparison kGreater = [](const Value& a, const Value& b) { return less(b, a); };
  static constexpr Comparison kAtMost = [](const Value& a, const Value& b) {
    return a == b || less(a, b);
  };
  static constexpr Comparison kAtLeast = [](const Value& a, const Value& b) {
    return a == b || less(b, a);
  };
  static const std::map<std::string_view, Comparison> known{
      {"==", kEqual},
      {"eq", kEqual},
      {"equalto", kEqual},
      {"!=", kOther},
      {"ne", kOther},
      {"<", kLess},
      {"lt", kLess},
      {"lessthan", kLess},
      {"<=", kAtMost},
      {"le", kAtMost},
      {">", kGreater},
      {"gt", kGreater},
      {"greaterthan", kGreater},
      {">=", kAtLeast},
      {"ge", kAtLeast},
      {"in", [](const Value& value, const Value& other) { return other.contains(value); }},
      {"divisibleby",
       [](const Value& value, const Value& other) {
         return binary("%", value, other) == Value(std::int64_t{0});
       }},
  };
  return known;
}

Value range(const Arguments& arguments) {
  const Parameters given("range", arguments, {"start", "stop", "step"});
  const bool one = given.given(1) == nullptr;
  const auto start = one ? 0 : given.integer(0, 0);
  const auto stop = given.integer(one ? 0 : 1, 0);
  const auto step = given.integer(2, 1);
  if (step == 0) fail_template("range() arg 3 must not be zero");
  List numbers;
  for (auto i = start; step > 0 ? i < stop : i > stop;) {
    if (numbers.items.size() >= kLongestRange) {
      fail_template(fmt::format("a range of more than {} numbers", kLongestRange));
    }
    numbers.items.emplace_back(i);
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  return numbers;
}

Value dictionary(std::string_view name, const Arguments& arguments, bool is_namespace) {
  Dict dict{.is_namespace = is_namespace};
  if (arguments.positional.size() > 1) fail_template(fmt::format("{} of several values", name));
  for (const auto& given : arguments.positional) {
    if (!given.is_dict()) fail_template(fmt::format("{} of {}", name, given.type_name()));
    dict.items = given.dict().items;
  }
  for (const auto& [key, value] : arguments.named) dict.set(key, value);
  return dict;
}

Value strftime_now(const Arguments& arguments) {
  const auto& format = Parameters("strftime_now", arguments, {"format"}).string(0);
  const auto now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  std::array<char, 1024> text{};
  const auto size = std::strftime(text.data(), text.size(), format.c_str(), &local);
  return std::string(text.data(), size);
}

}  // namespace

Parameters::Parameters(std::string_view function,
                       const Arguments& arguments,
                       std::vector<std::string_view> names)
    : function_(function), names_(std::move(names)), given_(names_.size()) {
  if (arguments.positional.size() > names_.size()) {
    fail_template(fmt::format("{} has {} arguments, not {}", function_, names_.size(),
                              arguments.positional.size()));
  }
  for (std::size_t i = 0; i < arguments.positional.size(); ++i) {
    given_[i] = &arguments.positional[i];
  }
  for (const auto& [name, value] : arguments.named) {
    const auto found = std::ranges::find(names_, name);
    if (found == names_.end()) {
      fail_template(fmt::format("the argument {} of {} is not supported", name, function_));
    }
    auto& place = given_[static_cast<std::size_t>(found - names_.begin())];
    if (place != nullptr) fail_template(fmt::format("{} has two arguments {}", function_, name));
    place = &value;
  }
}

const Value& Parameters::at(std::size_t i) const {
  if (given_[i] == nullptr) {
    fail_template(fmt::format("{} lacks its argument {}", function_, names_[i]));
  }
  return *given_[i];
}
const std::string& Parameters::string(std::size_t i) const {
  if (!at(i).is_string()) {
    fail_template(fmt::format("the argument {} of {} is {}, not a string", names_[i], function_,
                              at(i).type_name()));
  }
  return at(i).string();
}
std::int64_t Parameters::integer(std::size_t i, std::int64_t otherwise) const {
  if (!has(i)) return otherwise;
  if (!at(i).is_int() && !at(i).is_bool()) {
    fail_template(fmt::format("the argument {} of {} is {}, not an integer", names_[i], function_,
                              at(i).type_name()));
  }
  return at(i).integer();
}
bool Parameters::flag(std::size_t i, bool otherwise) const {
  return given_[i] == nullptr ? otherwise : given_[i]->truthy();
}

bool is_test(std::string_view name) {
  return tests().contains(name) || comparisons().contains(name);
}
bool apply_test(std::string_view name, const Value& value, const Arguments& arguments) {
  if (const auto found = tests().find(name); found != tests().end()) {
    const Parameters given(name, arguments, {});
    return found->second(value);
  }
  const auto found = comparisons().find(name);
  if (found == comparisons().end())
    fail_template(fmt::format("the test {} is not supported", name));
  return found->second(value, Parameters(name, arguments, {"other"}).at(0));
}

Value global_function(std::string_view name) {
  if (name == "range") return Function{"range", range};
  if (name == "dict") {
    return Function{"dict",
                    [](const Arguments& given) { return dictionary("dict", given, false); }};
  }
  if (name == "namespace") {
    return Function{"namespace",
                    [](const Arguments& given) { return dictionary("namespace", given, true); }};
  }
  if (name == "raise_exception") {
    return Function{"raise_exception", [](const Arguments& given) -> Value {
                      fail_template(Parameters("raise_exception", given, {"message"}).at(0).str());
                    }};
  }
  if (name == "strftime_now") return Function{"strftime_now", strftime_now};
  if (name == "cycler" || name == "joiner" || name == "lipsum") {
    fail_template(fmt::format("the function {} is not supported", name));
  }
  return Undefined{fmt::format("'{}' is undefined", name)};
}

}  // namespace ferry::rollout::text::jinja
