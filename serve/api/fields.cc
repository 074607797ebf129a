#include "serve/api/fields.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "rollout/text/shallow_json.h"

namespace ferry::serve {
namespace {

// A number that is written as 3.0 is an integer, too.
bool is_int64(const ordered_json& value) {
  if (value.is_number_float()) {
    const auto number = value.get<double>();
    return std::abs(number) <= 0x1p53 && number == std::floor(number);
  }
  return value.is_number_integer() &&
         (!value.is_number_unsigned() ||
          value.get<std::uint64_t>() <=
              static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()));
}

}  // namespace

ordered_json parse_object(std::string_view text) {
  if (rollout::text::nests_deeply(text))
    throw ApiError(
        400, fmt::format("the body is nested more than {} deep", rollout::text::kDeepestJson));
  try {
    auto value = distckpt::parse_ordered_json(text, "the body");
    if (value.is_object()) {
      rollout::text::keep_wide_integers(text, value,
                                        {"messages", "tools", "documents", "chat_template_kwargs"});
      return value;
    }
  } catch (const Error& error) {
    throw ApiError(400, error.what());
  }
  throw ApiError(400, "the body is no JSON object");
}

Fields::Fields(const ordered_json& object, std::string path)
    : object_(object), path_(std::move(path)) {
  if (object.is_object()) return;
  const auto param = path_.substr(0, path_.find_last_not_of('.') + 1);
  throw ApiError(400, param + ": is not an object", param);
}

const ordered_json* Fields::find(std::string_view name) const {
  const auto found = object_.find(name);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

void Fields::refuse(std::string_view name, const std::string& why) const {
  throw ApiError(400, fmt::format("{}{}: {}", path_, name, why), fmt::format("{}{}", path_, name));
}

void Fields::read(std::string_view name, bool& into) const {
  const auto* const value = find(name);
  if (value == nullptr) return;
  if (!value->is_boolean()) refuse(name, "is not true or false");
  into = value->get<bool>();
}

void Fields::read(std::string_view name, std::int64_t& into) const {
  const auto* const value = find(name);
  if (value == nullptr) return;
  if (!is_int64(*value)) refuse(name, "is not an integer of 64 bits");
  into = value->get<std::int64_t>();
}

void Fields::read(std::string_view name, double& into) const {
  const auto* const value = find(name);
  if (value == nullptr) return;
  if (!value->is_number()) refuse(name, "is not a number");
  into = value->get<double>();
}

void Fields::read(std::string_view name, std::string& into) const {
  const auto* const value = find(name);
  if (value == nullptr) return;
  if (!value->is_string()) refuse(name, "is not a string");
  into = value->get<std::string>();
}

void Fields::read(std::string_view name, std::vector<std::int64_t>& into) const {
  const auto* const value = find(name);
  if (value != nullptr) into = token_ids_of(*value, fmt::format("{}{}", path_, name));
}

void Fields::read_strings(std::string_view name, std::vector<std::string>& into) const {
  const auto* const value = find(name);
  if (value == nullptr) return;
  into.clear();
  if (value->is_string()) return into.push_back(value->get<std::string>());
  if (!value->is_array()) refuse(name, "is neither a string nor a list of strings");
  for (const auto& one : *value) {
    if (!one.is_string()) refuse(name, "is neither a string nor a list of strings");
    into.push_back(one.get<std::string>());
  }
}

std::vector<std::int64_t> token_ids_of(const ordered_json& list, const std::string& param) {
  const auto refuse = [&] { throw ApiError(400, param + ": is not a list of token ids", param); };
  if (!list.is_array()) refuse();
  std::vector<std::int64_t> ids;
  ids.reserve(list.size());
  for (const auto& one : list) {
    if (!is_int64(one)) refuse();
    ids.push_back(one.get<std::int64_t>());
  }
  return ids;
}

}  // namespace ferry::serve
