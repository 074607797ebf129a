// JSON, strictly: a key that occurs twice is an error, and errors name the file and the byte.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace ferry::distckpt {

// Sorted keys; fast for the 92,000 keys of a large index.
nlohmann::json parse_json(std::string_view text, std::string_view source);

// Keeps the order of the keys: for configurations that are written back.
nlohmann::ordered_json parse_ordered_json(std::string_view text, std::string_view source);

// Members of an object. All throw Error(kCorrupt) "<source>: <key>: ..." if it lacks or is of
// another type.
const nlohmann::json& json_at(const nlohmann::json& object,
                              std::string_view key,
                              std::string_view source);
std::int64_t json_int(const nlohmann::json& value, std::string_view key, std::string_view source);
std::string json_string(const nlohmann::json& value, std::string_view key, std::string_view source);

}  // namespace ferry::distckpt
