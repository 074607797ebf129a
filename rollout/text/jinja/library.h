// The built-in functions of templates: operators, members and methods of values, filters, tests and
// global functions, with the results of Python and Jinja 3.1. Names that those know and this
// library lacks are refused.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "rollout/text/jinja/value.h"

namespace ferry::rollout::text::jinja {

// The arguments of a call by the names of its parameters.
class Parameters {
 public:
  // Throws Error if there are more arguments than `names`, unknown ones, or one twice.
  Parameters(std::string_view function,
             const Arguments& arguments,
             std::vector<std::string_view> names);

  bool has(std::size_t i) const { return given_[i] != nullptr && !given_[i]->is_none(); }
  const Value* given(std::size_t i) const { return given_[i]; }  // null: not given
  const Value& at(std::size_t i) const;                          // throws Error if it is not given
  const std::string& string(std::size_t i) const;
  std::int64_t integer(std::size_t i, std::int64_t otherwise) const;
  bool flag(std::size_t i, bool otherwise) const;

 private:
  std::string function_;
  std::vector<std::string_view> names_;
  std::vector<const Value*> given_;
};

// Returns its argument, or throws Error: a text of more than 64 MiB or a list of more than a
// million items would take the memory of the machine.
std::string bounded(std::string text);
List bounded(List list);

Value binary(std::string_view symbol, const Value& a, const Value& b);  // all but "and" and "or"
Value negative(const Value& value);

Value attribute(const Value& object, std::string_view name);  // object.name
Value item(const Value& object, const Value& index);          // object[index]
Value slice(const Value& object, const Value& start, const Value& stop, const Value& step);
Value nested_item(const Value& object, const Value& path);  // "a.b", as map(attribute=...) has it

// A method of a string, a list or a dictionary, bound to it. Undefined: there is none.
Value string_method(const Value& object, std::string_view name);
Value list_method(const Value& object, std::string_view name);
Value dict_method(const Value& object, std::string_view name);

std::string stripped(std::string_view text, const Value* characters, bool left, bool right);
std::string replaced(std::string_view text,
                     std::string_view from,
                     std::string_view to,
                     std::int64_t most);
std::string capitalized(std::string_view text);

bool is_test(std::string_view name);
bool apply_test(std::string_view name, const Value& value, const Arguments& arguments);
bool is_filter(std::string_view name);
Value apply_filter(std::string_view name, const Value& value, const Arguments& arguments);
// range, namespace, dict, raise_exception, strftime_now. Undefined: there is none.
Value global_function(std::string_view name);

}  // namespace ferry::rollout::text::jinja
