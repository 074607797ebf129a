// A value as the bytes that one rank of a program sends to another: CBOR, through the to_json() and
// from_json() of its type. Text may hold any bytes, and numbers keep their bits but for the payload
// of a NaN.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace ferry {

template <typename T>
std::string to_cbor(const T& value) {
  std::string bytes;
  nlohmann::json::to_cbor(value, bytes);
  return bytes;
}

// Throws nlohmann::json::exception if the bytes are no value of the type.
template <typename T>
T from_cbor(std::string_view bytes) {
  return nlohmann::json::from_cbor(bytes.begin(), bytes.end()).get<T>();
}

}  // namespace ferry
