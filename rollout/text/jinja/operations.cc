// Operators, members, items and slices.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "rollout/text/jinja/library.h"
#include "rollout/text/unicode/unicode.h"

namespace ferry::rollout::text::jinja {
namespace {

constexpr std::size_t kLongestText = std::size_t{1} << 26;
constexpr std::size_t kLongestList = 1'000'000;

[[noreturn]] void fail_operands(std::string_view symbol, const Value& a, const Value& b) {
  fail_template(fmt::format("unsupported operand type(s) for {}: '{}' and '{}'", symbol,
                            a.type_name(), b.type_name()));
}

// `number` is a reference, because the evaluation of `overflow` sets it.
std::int64_t checked(bool overflow, const std::int64_t& number) {
  if (overflow) fail_template("a number is too large");
  return number;
}

std::int64_t floor_divided(std::int64_t a, std::int64_t b) {
  if (b == 0) fail_template("integer division or modulo by zero");
  if (b == -1) return checked(a == INT64_MIN, -a);
  return a / b - ((a % b != 0 && (a < 0) != (b < 0)) ? 1 : 0);
}

Value power(const Value& a, const Value& b) {
  if (a.is_float() || b.is_float() || b.integer() < 0) return std::pow(a.real(), b.real());
  std::int64_t result = 1;
  if (b.integer() > 64 && a.integer() != 0 && a.integer() != 1 && a.integer() != -1) {
    checked(true, 0);
  }
  const auto times = a.integer() == -1 ? b.integer() % 2 : std::min<std::int64_t>(b.integer(), 64);
  for (std::int64_t i = 0; i < times; ++i) {
    checked(__builtin_mul_overflow(result, a.integer(), &result), 0);
  }
  return result;
}

Value arithmetic(std::string_view symbol, const Value& a, const Value& b) {
  if (symbol == "**") return power(a, b);
  if (symbol == "/") {
    if (b.real() == 0) fail_template("division by zero");
    return a.real() / b.real();
  }
  if (a.is_float() || b.is_float()) {
    const auto x = a.real(), y = b.real();
    if (symbol == "+") return x + y;
    if (symbol == "-") return x - y;
    if (symbol == "*") return x * y;
    if (y == 0) fail_template("float floor division or modulo by zero");
    if (symbol == "//") return std::floor(x / y);
    const auto rest = std::fmod(x, y);
    return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
  }
  const auto x = a.integer(), y = b.integer();
  std::int64_t result = 0;
  if (symbol == "+") return checked(__builtin_add_overflow(x, y, &result), result);
  if (symbol == "-") return checked(__builtin_sub_overflow(x, y, &result), result);
  if (symbol == "*") return checked(__builtin_mul_overflow(x, y, &result), result);
  const auto quotient = floor_divided(x, y);
  return symbol == "//" ? quotient : x - quotient * y;
}

Value repeated(const Value& sequence, std::int64_t times) {
  const auto count = static_cast<std::size_t>(std::max<std::int64_t>(times, 0));
  if (sequence.is_string()) {
    const auto& unit = sequence.string();
    if (!unit.empty() && count > kLongestText / unit.size()) fail_template("a text is too long");
    std::string text;
    for (std::size_t i = 0; i < count && !unit.empty(); ++i) text += unit;
    return text;
  }
  const auto& unit = sequence.list().items;
  if (!unit.empty() && count > kLongestList / unit.size()) fail_template("a list is too long");
  List list{.is_tuple = sequence.list().is_tuple};
  for (std::size_t i = 0; i < count && !unit.empty(); ++i) {
    list.items.insert(list.items.end(), unit.begin(), unit.end());
  }
  return list;
}

// Returns Undefined if there is no such item.
Value list_item(const Value& list, std::int64_t index) {
  const auto items = list.iterate();
  const auto size = static_cast<std::int64_t>(items.size());
  if (index < 0) index += size;
  if (index < 0 || index >= size) {
    return Undefined{fmt::format("{} object has no element {}", list.type_name(), index)};
  }
  return items[static_cast<std::size_t>(index)];
}

void require_defined(const Value& value) {
  if (value.is_undefined()) fail_template(value.undefined().what);
}

}  // namespace

std::string bounded(std::string text) {
  if (text.size() > kLongestText) fail_template("a text is too long");
  return text;
}
List bounded(List list) {
  if (list.items.size() > kLongestList) fail_template("a list is too long");
  return list;
}

Value binary(std::string_view symbol, const Value& a, const Value& b) {
  if (symbol == "~") return bounded(a.str() + b.str());
  require_defined(a);
  require_defined(b);
  if (a.is_number() && b.is_number()) return arithmetic(symbol, a, b);
  if (symbol == "+" && a.is_string() && b.is_string()) return bounded(a.string() + b.string());
  if (symbol == "+" && a.is_list() && b.is_list() && a.list().is_tuple == b.list().is_tuple) {
    auto joined = a.list();
    joined.items.insert(joined.items.end(), b.list().items.begin(), b.list().items.end());
    return bounded(std::move(joined));
  }
  const auto is_integer = [](const Value& value) { return value.is_int() || value.is_bool(); };
  if (symbol == "*" && is_integer(b) && (a.is_string() || a.is_list())) {
    return repeated(a, b.integer());
  }
  if (symbol == "*" && is_integer(a) && (b.is_string() || b.is_list())) {
    return repeated(b, a.integer());
  }
  if (symbol == "%" && a.is_string()) fail_template("the operator % of a string is not supported");
  fail_operands(symbol, a, b);
}

Value negative(const Value& value) {
  require_defined(value);
  if (value.is_float()) return -value.real();
  if (!value.is_number()) {
    fail_template(fmt::format("bad operand type for unary -: '{}'", value.type_name()));
  }
  return checked(value.integer() == INT64_MIN, -value.integer());
}

Value attribute(const Value& object, std::string_view name) {
  require_defined(object);
  if (object.is_dict()) {
    if (!object.dict().is_namespace) {
      if (auto method = dict_method(object, name); !method.is_undefined()) return method;
    }
    if (const auto* member = object.dict().find(name)) return *member;
  } else if (object.is_string()) {
    if (auto method = string_method(object, name); !method.is_undefined()) return method;
  } else if (object.is_list()) {
    if (auto method = list_method(object, name); !method.is_undefined()) return method;
  }
  return Undefined{fmt::format("'{} object' has no attribute '{}'", object.type_name(), name)};
}

Value item(const Value& object, const Value& index) {
  require_defined(object);
  if (object.is_dict() && !object.dict().is_namespace) {
    if (const auto* member = object.dict().find_key(index)) return *member;
  }
  if ((object.is_list() || object.is_string()) && (index.is_int() || index.is_bool())) {
    return list_item(object, index.integer());
  }
  if (index.is_string()) return attribute(object, index.string());
  return Undefined{fmt::format("'{} object' has no item {}", object.type_name(), index.repr())};
}

Value nested_item(const Value& object, const Value& path) {
  if (path.is_int()) return item(object, path);
  if (!path.is_string()) fail_template("an attribute is neither a name nor a number");
  auto found = object;
  std::string_view rest = path.string();
  while (true) {
    const auto dot = rest.find('.');
    const auto part = rest.substr(0, dot);
    const bool number = !part.empty() && part.size() < 10 &&
                        std::ranges::all_of(part, [](char c) { return c >= '0' && c <= '9'; });
    found = item(found, number ? Value(std::int64_t{std::stoi(std::string(part))}) : Value(part));
    if (dot == std::string_view::npos) return found;
    rest.remove_prefix(dot + 1);
  }
}

Value slice(const Value& object, const Value& start, const Value& stop, const Value& step) {
  require_defined(object);
  if (!object.is_list() && !object.is_string()) {
    return Undefined{fmt::format("'{}' object has no slices", object.type_name())};
  }
  const auto number = [](const Value& value, std::int64_t otherwise) {
    if (value.is_none()) return otherwise;
    if (!value.is_int() && !value.is_bool()) fail_template("slice indices must be integers");
    return value.integer();
  };
  const auto items = object.iterate();
  const auto size = static_cast<std::int64_t>(items.size());
  const auto by = number(step, 1);
  if (by == 0) fail_template("slice step cannot be zero");
  const std::int64_t low = by > 0 ? 0 : -1, high = by > 0 ? size : size - 1;
  const auto bound = [&](const Value& value, std::int64_t otherwise) {
    if (value.is_none()) return otherwise;
    auto index = number(value, 0);
    if (index < 0) index = std::max(index, -size - 1) + size;
    return std::clamp(index, low, high);
  };
  const auto first = bound(start, by > 0 ? low : high);
  const auto last = bound(stop, by > 0 ? high : low);
  List found{.is_tuple = object.is_list() && object.list().is_tuple};
  const auto stride = std::clamp(by, -size - 1, size + 1);
  for (auto i = first; by > 0 ? i < last : i > last; i += stride) {
    found.items.push_back(items[static_cast<std::size_t>(i)]);
  }
  if (object.is_list()) return found;
  std::string text;
  for (const auto& character : found.items) text += character.string();
  return text;
}

}  // namespace ferry::rollout::text::jinja
