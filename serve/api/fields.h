// The members of a request's JSON object, by name and type. A member that is null counts as absent.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "serve/api/api_error.h"

namespace ferry::serve {

// Throws ApiError 400 if the text is no JSON object, or nested so deeply that reading it by
// recursion would be unsafe. Integers of more than 64 bits are wide_integer()s (shallow_json.h)
// where a chat template sees them.
ordered_json parse_object(std::string_view text);

class Fields {
 public:
  // `path`: of the object itself, "stream_options." Throws ApiError 400 if it is no object.
  explicit Fields(const ordered_json& object, std::string path = "");

  const ordered_json* find(std::string_view name) const;  // null if absent
  bool has(std::string_view name) const { return find(name) != nullptr; }

  // Each leaves `into` alone if the member is absent, and throws ApiError 400 if it has another
  // type.
  void read(std::string_view name, bool& into) const;
  void read(std::string_view name, std::int64_t& into) const;
  void read(std::string_view name, double& into) const;
  void read(std::string_view name, std::string& into) const;
  void read(std::string_view name, std::vector<std::int64_t>& into) const;
  template <typename T>
  void read(std::string_view name, std::optional<T>& into) const {
    if (!has(name)) return;
    T value{};
    read(name, value);
    into = std::move(value);
  }
  // A string or a list of strings.
  void read_strings(std::string_view name, std::vector<std::string>& into) const;

  [[noreturn]] void refuse(std::string_view name, const std::string& why) const;

 private:
  const ordered_json& object_;
  std::string path_;
};

std::vector<std::int64_t> token_ids_of(const ordered_json& list, const std::string& param);

}  // namespace ferry::serve
