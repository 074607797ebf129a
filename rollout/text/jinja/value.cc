#include "rollout/text/jinja/value.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "distckpt/base/error.h"
#include "rollout/text/unicode/unicode.h"

namespace ferry::rollout::text::jinja {
namespace {

constexpr int kDeepestValue = 200;  // levels of values inside of values, when they are written

bool is_printable(char32_t c) {
  // Letters, marks, numbers, punctuation, symbols: what is assigned, but separators and controls.
  static const auto printable = [] {
    CodePointSet set;
    for (const char* name : {"L", "M", "N", "P", "S"}) set = set.united(*CodePointSet::named(name));
    return set;
  }();
  return c == ' ' || printable.contains(c);
}

// Python's repr(): single quotes, unless the text has those and no double ones.
std::string repr_of_string(std::string_view text) {
  const char quote = text.find('\'') != text.npos && text.find('"') == text.npos ? '"' : '\'';
  std::string written(1, quote);
  for (std::size_t at = 0; at < text.size();) {
    const auto c = next_code_point(text, at);
    if (c == static_cast<char32_t>(quote) || c == '\\') {
      written.push_back('\\');
      append_utf8(c, written);
    } else if (c == '\n') {
      written += "\\n";
    } else if (c == '\r') {
      written += "\\r";
    } else if (c == '\t') {
      written += "\\t";
    } else if (is_printable(c)) {
      append_utf8(c, written);
    } else if (c < 0x100) {
      written += fmt::format("\\x{:02x}", static_cast<std::uint32_t>(c));
    } else if (c < 0x10000) {
      written += fmt::format("\\u{:04x}", static_cast<std::uint32_t>(c));
    } else {
      written += fmt::format("\\U{:08x}", static_cast<std::uint32_t>(c));
    }
  }
  written.push_back(quote);
  return written;
}

std::string repr_of(const Value& value, int depth) {
  if (depth > kDeepestValue) fail_template("a value is nested too deep");
  if (value.is_undefined()) return "Undefined";
  if (value.is_none()) return "None";
  if (value.is_bool()) return value.integer() != 0 ? "True" : "False";
  if (value.is_int()) return std::to_string(value.integer());
  if (value.is_wide_int()) return value.digits();
  if (value.is_float()) return repr_of_float(value.real());
  if (value.is_string()) return repr_of_string(value.string());
  if (value.is_function()) fail_template("a function cannot be written");
  std::string text;
  if (value.is_list()) {
    const auto& list = value.list();
    for (const auto& item : list.items) {
      text += (text.empty() ? "" : ", ") + repr_of(item, depth + 1);
    }
    if (!list.is_tuple) return "[" + text + "]";
    return "(" + text + (list.items.size() == 1 ? ",)" : ")");
  }
  if (value.dict().is_namespace) fail_template("a namespace cannot be written");
  for (const auto& [key, item] : value.dict().items) {
    text += (text.empty() ? "" : ", ") + repr_of(key, depth + 1) + ": " + repr_of(item, depth + 1);
  }
  return "{" + text + "}";
}

class JsonWriter {
 public:
  JsonWriter(const JsonFormat& format, std::string& into) : format_(format), into_(into) {}

  void write(const Value& value, int depth) {
    if (depth > kDeepestValue) fail_template("a value is nested too deep");
    if (value.is_none()) {
      into_ += "null";
    } else if (value.is_bool()) {
      into_ += value.integer() != 0 ? "true" : "false";
    } else if (value.is_int()) {
      into_ += std::to_string(value.integer());
    } else if (value.is_wide_int()) {
      into_ += value.digits();
    } else if (value.is_float()) {
      const auto number = value.real();
      into_ += std::isnan(number)   ? "NaN"
               : std::isinf(number) ? (number > 0 ? "Infinity" : "-Infinity")
                                    : repr_of_float(number);
    } else if (value.is_string()) {
      write_string(value.string());
    } else if (value.is_list()) {
      const auto& items = value.list().items;
      write_items('[', ']', items.size(), depth,
                  [&](std::size_t i) { write(items[i], depth + 1); });
    } else if (value.is_dict() && !value.dict().is_namespace) {
      auto items = value.dict().items;
      if (format_.sort_keys)
        std::ranges::stable_sort(items, less, [](auto& item) { return item.first; });
      write_items('{', '}', items.size(), depth, [&](std::size_t i) {
        write_key(items[i].first);
        into_ += format_.key_separator;
        write(items[i].second, depth + 1);
      });
    } else {
      fail_template(fmt::format("Object of type {} is not JSON serializable", value.type_name()));
    }
  }

 private:
  template <typename WriteItem>
  void write_items(char begin, char end, std::size_t count, int depth, WriteItem&& write_item) {
    into_.push_back(begin);
    for (std::size_t i = 0; i < count; ++i) {
      if (i > 0) into_ += format_.item_separator;
      write_break(depth + 1);
      write_item(i);
    }
    if (count > 0) write_break(depth);
    into_.push_back(end);
  }
  void write_key(const Value& key) {
    if (key.is_list()) {
      fail_template("keys must be str, int, float, bool or None, not tuple");
    }
    if (key.is_string()) {
      write_string(key.string());
    } else {
      into_.push_back('"');
      write(key, 0);
      into_.push_back('"');
    }
  }
  void write_break(int depth) {
    if (!format_.indented) return;
    into_.push_back('\n');
    for (int i = 0; i < depth; ++i) into_ += format_.indent;
  }
  void write_unit(std::uint32_t unit) { into_ += fmt::format("\\u{:04x}", unit); }

  void write_string(std::string_view text) {
    into_.push_back('"');
    for (std::size_t at = 0; at < text.size();) {
      const auto c = next_code_point(text, at);
      static constexpr std::u32string_view kSpecial = U"\"\\\n\r\t\b\f";
      static constexpr std::string_view kEscapes = "\"\\nrtbf";
      const auto special = kSpecial.find(c);
      if (special != kSpecial.npos) {
        into_ += {'\\', kEscapes[special]};
      } else if (c >= 0x20 && (c < 0x7F || !format_.ensure_ascii)) {
        append_utf8(c, into_);
      } else if (c < 0x10000) {
        write_unit(c);
      } else {  // a pair of UTF-16
        write_unit(0xD800 + ((c - 0x10000) >> 10));
        write_unit(0xDC00 + ((c - 0x10000) & 0x3FF));
      }
    }
    into_.push_back('"');
  }

  const JsonFormat& format_;
  std::string& into_;
};

}  // namespace

void fail_template(const std::string& message) {
  throw Error(ErrorKind::kUsage, message);
}

Value::Value(List list) : data_(std::make_shared<List>(std::move(list))) {}
Value::Value(Dict dict) : data_(std::make_shared<Dict>(std::move(dict))) {}
Value::Value(Function function) : data_(std::make_shared<const Function>(std::move(function))) {}

const Value* Dict::find(std::string_view key) const {
  const auto found = std::ranges::find_if(items, [&](const auto& item) {
    return item.first.is_string() && item.first.string() == key;
  });
  return found == items.end() ? nullptr : &found->second;
}
const Value* Dict::find_key(const Value& key) const {
  const auto found =
      std::ranges::find_if(items, [&](const auto& item) { return item.first == key; });
  return found == items.end() ? nullptr : &found->second;
}
void Dict::set(std::string_view key, Value value) {
  set_key(key, std::move(value));
}
void Dict::set_key(const Value& key, Value value) {
  key.require_hash();
  const auto found =
      std::ranges::find_if(items, [&](const auto& item) { return item.first == key; });
  if (found == items.end()) {
    items.emplace_back(key, std::move(value));
  } else {
    found->second = std::move(value);
  }
}

Value Value::of_json(const nlohmann::ordered_json& json) {
  switch (json.type()) {
    case nlohmann::ordered_json::value_t::boolean:
      return json.get<bool>();
    case nlohmann::ordered_json::value_t::number_integer:
      return json.get<std::int64_t>();
    case nlohmann::ordered_json::value_t::number_unsigned: {
      const auto number = json.get<std::uint64_t>();
      if (number > INT64_MAX) return WideInteger{std::to_string(number)};
      return static_cast<std::int64_t>(number);
    }
    case nlohmann::ordered_json::value_t::number_float:
      return json.get<double>();
    case nlohmann::ordered_json::value_t::binary:  // shallow_json.h: of a wide integer
      return WideInteger{std::string(json.get_binary().begin(), json.get_binary().end())};
    case nlohmann::ordered_json::value_t::string:
      return replace_invalid_utf8(json.get_ref<const std::string&>());
    case nlohmann::ordered_json::value_t::array: {
      List list;
      for (const auto& item : json) list.items.push_back(of_json(item));
      return list;
    }
    case nlohmann::ordered_json::value_t::object: {
      Dict dict;
      for (const auto& [key, item] : json.items()) {
        dict.items.emplace_back(replace_invalid_utf8(key), of_json(item));
      }
      return dict;
    }
    default:
      return None{};
  }
}

bool Value::truthy() const {
  if (is_undefined() || is_none()) return false;
  if (is_bool() || is_int()) return integer() != 0;
  if (is_float()) return real() != 0;
  if (is_string()) return !string().empty();
  if (is_list()) return !list().items.empty();
  if (is_dict()) return dict().is_namespace || !dict().items.empty();
  return true;
}

std::string_view Value::type_name() const {
  if (is_undefined()) return "Undefined";
  if (is_none()) return "NoneType";
  if (is_bool()) return "bool";
  if (is_int() || is_wide_int()) return "int";
  if (is_float()) return "float";
  if (is_string()) return "str";
  if (is_list()) return list().is_tuple ? "tuple" : "list";
  if (is_dict()) return dict().is_namespace ? "Namespace" : "dict";
  return "function";
}

std::string Value::str() const {
  if (is_string()) return string();
  if (is_undefined()) return "";
  return repr();
}
std::string Value::repr() const {
  return repr_of(*this, 0);
}

std::vector<Value> Value::iterate() const {
  if (is_list()) return list().items;
  std::vector<Value> items;
  if (is_string()) {
    for (std::size_t at = 0; at < string().size();) {
      const auto begin = at;
      next_code_point(string(), at);
      items.emplace_back(std::string_view(string()).substr(begin, at - begin));
    }
  } else if (is_dict() && !dict().is_namespace) {
    for (const auto& [key, item] : dict().items) items.emplace_back(key);
  } else if (!is_undefined()) {
    fail_template(fmt::format("'{}' object is not iterable", type_name()));
  }
  return items;
}

std::size_t Value::length() const {
  if (is_list()) return list().items.size();
  if (is_dict() && !dict().is_namespace) return dict().items.size();
  if (is_undefined()) return 0;
  if (is_string()) {
    return static_cast<std::size_t>(std::ranges::count_if(
        string(), [](char byte) { return (static_cast<unsigned char>(byte) & 0xC0) != 0x80; }));
  }
  fail_template(fmt::format("object of type '{}' has no len()", type_name()));
}

bool Value::contains(const Value& item) const {
  if (is_string()) {
    if (!item.is_string()) {
      fail_template(
          fmt::format("'in <string>' requires string as left operand, not {}", item.type_name()));
    }
    return string().find(item.string()) != std::string::npos;
  }
  if (is_dict() && !dict().is_namespace) {
    item.require_hash();
    return dict().find_key(item) != nullptr;
  }
  return std::ranges::any_of(iterate(), [&](const Value& own) { return own == item; });
}

void Value::require_hash() const {
  if (is_dict() || (is_list() && !list().is_tuple)) {
    fail_template(fmt::format("unhashable type: '{}'", type_name()));
  }
  if (is_list()) {
    for (const auto& item : list().items) item.require_hash();
  }
}

bool operator==(const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) {
    return a.is_float() || b.is_float() ? a.real() == b.real() : a.integer() == b.integer();
  }
  if (a.is_wide_int() && b.is_wide_int()) return a.digits() == b.digits();
  if (a.is_string() && b.is_string()) return a.string() == b.string();
  if (a.is_none()) return b.is_none();
  if (a.is_undefined()) return b.is_undefined();
  if (a.is_list() && b.is_list()) {
    return a.list().is_tuple == b.list().is_tuple && a.list().items == b.list().items;
  }
  if (a.is_dict() && b.is_dict()) {
    const auto& left = a.dict().items;
    return left.size() == b.dict().items.size() && std::ranges::all_of(left, [&](const auto& item) {
             const auto* other = b.dict().find_key(item.first);
             return other != nullptr && *other == item.second;
           });
  }
  return a.is_function() && b.is_function() && &a.function() == &b.function();
}

bool less(const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) {
    return a.is_float() || b.is_float() ? a.real() < b.real() : a.integer() < b.integer();
  }
  // UTF-8 has the order of the characters.
  if (a.is_string() && b.is_string()) return a.string() < b.string();
  if (a.is_list() && b.is_list() && a.list().is_tuple == b.list().is_tuple) {
    const auto& left = a.list().items;
    const auto& right = b.list().items;
    for (std::size_t i = 0; i < std::min(left.size(), right.size()); ++i) {
      if (!(left[i] == right[i])) return less(left[i], right[i]);
    }
    return left.size() < right.size();
  }
  fail_template(fmt::format("'{}' and '{}' have no order", a.type_name(), b.type_name()));
}

std::string repr_of_float(double number) {
  if (std::isnan(number)) return "nan";
  if (std::isinf(number)) return number > 0 ? "inf" : "-inf";
  auto text = fmt::format("{}", number);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

std::string to_json(const Value& value, const JsonFormat& format) {
  std::string text;
  JsonWriter(format, text).write(value, 0);
  return text;
}

}  // namespace ferry::rollout::text::jinja
