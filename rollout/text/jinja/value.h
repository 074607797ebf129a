// The values of chat templates: those of Python that Jinja shows, with Python's equality, order,
// truth and spelling.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace ferry::rollout::text::jinja {

class Value;

// A name or member that does not exist. It prints as nothing; using it is an error with its name.
struct Undefined {
  std::string what{};  // "'x' is undefined"
};
struct None {};
// An integer of more than 64 bits, which is only written, and compared with others.
struct WideInteger {
  std::string digits{};
};

struct List;
struct Dict;
struct Arguments;
struct Function;

class Value {
 public:
  Value() : data_(None{}) {}
  Value(None none) : data_(none) {}  // NOLINT(google-explicit-constructor)
  Value(Undefined undefined)
      : data_(std::move(undefined)) {}                        // NOLINT(google-explicit-constructor)
  Value(bool flag) : data_(flag) {}                           // NOLINT(google-explicit-constructor)
  Value(std::int64_t number) : data_(number) {}               // NOLINT(google-explicit-constructor)
  Value(double number) : data_(number) {}                     // NOLINT(google-explicit-constructor)
  Value(WideInteger number) : data_(std::move(number)) {}     // NOLINT(google-explicit-constructor)
  Value(std::string text) : data_(std::move(text)) {}         // NOLINT(google-explicit-constructor)
  Value(std::string_view text) : data_(std::string(text)) {}  // NOLINT(google-explicit-constructor)
  Value(const char* text) : data_(std::string(text)) {}       // NOLINT(google-explicit-constructor)
  Value(List list);                                           // NOLINT(google-explicit-constructor)
  Value(Dict dict);                                           // NOLINT(google-explicit-constructor)
  Value(Function function);                                   // NOLINT(google-explicit-constructor)

  static Value of_json(const nlohmann::ordered_json& json);

  bool is_undefined() const { return is<Undefined>(); }
  bool is_none() const { return is<None>(); }
  bool is_bool() const { return is<bool>(); }
  bool is_int() const { return is<std::int64_t>(); }      // and no bool
  bool is_wide_int() const { return is<WideInteger>(); }  // and no is_number()
  bool is_float() const { return is<double>(); }
  bool is_number() const { return is_bool() || is_int() || is_float(); }
  bool is_string() const { return is<std::string>(); }
  bool is_list() const { return is<std::shared_ptr<List>>(); }
  bool is_dict() const { return is<std::shared_ptr<Dict>>(); }
  bool is_function() const { return is<std::shared_ptr<const Function>>(); }

  const Undefined& undefined() const { return std::get<Undefined>(data_); }
  const std::string& digits() const { return std::get<WideInteger>(data_).digits; }
  const std::string& string() const { return std::get<std::string>(data_); }
  const List& list() const { return *std::get<std::shared_ptr<List>>(data_); }
  const Dict& dict() const { return *std::get<std::shared_ptr<Dict>>(data_); }
  Dict& mutable_dict() const { return *std::get<std::shared_ptr<Dict>>(data_); }
  const Function& function() const { return *std::get<std::shared_ptr<const Function>>(data_); }
  // The number of a bool or an integer.
  std::int64_t integer() const {
    return is_bool() ? std::int64_t{std::get<bool>(data_)} : std::get<std::int64_t>(data_);
  }
  double real() const {
    return is_float() ? std::get<double>(data_) : static_cast<double>(integer());
  }

  bool truthy() const;
  std::string_view type_name() const;  // as Python calls it
  std::string str() const;             // as {{ }} writes it
  std::string repr() const;

  // The items of a list, the keys of a dictionary, the characters of a string, no items of an
  // undefined value. Throws Error for any other value.
  std::vector<Value> iterate() const;
  std::size_t length() const;              // of iterate()
  bool contains(const Value& item) const;  // item in this
  void require_hash() const;               // throws Error for a list or a dictionary

 private:
  template <typename T>
  bool is() const {
    return std::holds_alternative<T>(data_);
  }

  std::variant<None,
               Undefined,
               bool,
               std::int64_t,
               double,
               WideInteger,
               std::string,
               std::shared_ptr<List>,
               std::shared_ptr<Dict>,
               std::shared_ptr<const Function>>
      data_;
};

struct List {
  std::vector<Value> items{};
  bool is_tuple = false;
};
// In the order of insertion. Keys are equal as Python's are: 1, 1.0 and true are one.
struct Dict {
  std::vector<std::pair<Value, Value>> items{};
  bool is_namespace = false;  // whose members templates may set

  const Value* find(std::string_view key) const;
  const Value* find_key(const Value& key) const;
  void set(std::string_view key, Value value);
  void set_key(const Value& key, Value value);  // throws Error for a key that Python cannot hash
};

struct Arguments {
  std::vector<Value> positional{};
  std::vector<std::pair<std::string, Value>> named{};
};
// A macro, a global function, or a method bound to its object.
struct Function {
  std::string name{};
  std::function<Value(const Arguments&)> call{};
};

bool operator==(const Value& a, const Value& b);
bool less(const Value& a, const Value& b);  // throws Error if the two have no order

// json.dumps(value, ensure_ascii=False, ...)
struct JsonFormat {
  bool ensure_ascii = false;
  bool sort_keys = false;
  bool indented = false;
  std::string indent{};  // of one level
  std::string item_separator = ", ";
  std::string key_separator = ": ";
};
std::string to_json(const Value& value, const JsonFormat& format);

std::string repr_of_float(double number);

// Error(kUsage); the evaluator adds the line.
[[noreturn]] void fail_template(const std::string& message);

}  // namespace ferry::rollout::text::jinja
