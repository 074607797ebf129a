// JSON, strictly: a key that occurs twice is an error, and errors name the file and the byte.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "distckpt/base/box.h"

namespace ferry::distckpt {

// Sorted keys; fast for the 92,000 keys of a large index.
nlohmann::json parse_json(std::string_view text, std::string_view source);

// Calls `visit` for each member of an object, which is all of the text, in the order of the text,
// so that one value alone is held at a time. Duplicate keys are for the caller to find. Throws
// Error(kCorrupt) "<source>: ..." if the text is no object.
void visit_json_members(std::string_view text,
                        std::string_view source,
                        const std::function<void(std::string& key, nlohmann::json& value)>& visit);

// The value of a line that may be broken off, or discarded (json::is_discarded()) if the text is no
// JSON. The last of two equal keys counts.
nlohmann::json json_or_discarded(std::string_view text);

// Keeps the order of the keys: for configurations that are written back.
nlohmann::ordered_json parse_ordered_json(std::string_view text, std::string_view source);

// The same of config.json and its like, which Python writes: the words NaN, Infinity and -Infinity
// are numbers there, as Python's json reads them.
nlohmann::json parse_python_json(std::string_view text, std::string_view source);
nlohmann::ordered_json parse_ordered_python_json(std::string_view text, std::string_view source);

// The text of a value with those words for such numbers, for which JSON has none; on one line, or
// one line for each member and element, indented by that many blanks.
std::string python_json(const nlohmann::json& value, std::optional<int> indent = std::nullopt);
std::string python_json(const nlohmann::ordered_json& value,
                        std::optional<int> indent = std::nullopt);

// Members of an object. All throw Error(kCorrupt) "<source>: <key>: ..." if it lacks or is of
// another type.
const nlohmann::json& json_at(const nlohmann::json& object,
                              std::string_view key,
                              std::string_view source);
std::int64_t json_int(const nlohmann::json& value, std::string_view key, std::string_view source);
std::string json_string(const nlohmann::json& value, std::string_view key, std::string_view source);
std::string json_string_at(const nlohmann::json& object,
                           std::string_view key,
                           std::string_view source);
Dims json_dims_at(const nlohmann::json& object, std::string_view key, std::string_view source);

// Throws Error(kLayout) if the member "format" of a file of ours names another one.
void require_json_format(const nlohmann::json& object,
                         std::string_view format,
                         std::string_view source);

}  // namespace ferry::distckpt
