// A value as the bytes that one rank of a program sends to another: CBOR, through the to_json() and
// from_json() of its type. Text may hold any bytes, and numbers keep their bits but for the payload
// of a NaN.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace ferry {

// JSON as CBOR and back. Throws nlohmann::json::exception for bytes that are none.
std::string json_to_cbor(const nlohmann::json& json);
nlohmann::json json_from_cbor(std::string_view bytes);

template <typename T>
std::string to_cbor(const T& value) {
  return json_to_cbor(value);
}

// Throws nlohmann::json::exception if the bytes are no value of the type.
template <typename T>
T from_cbor(std::string_view bytes) {
  return json_from_cbor(bytes).get<T>();
}

}  // namespace ferry
