#include "distckpt/base/cbor.h"

namespace ferry {

std::string json_to_cbor(const nlohmann::json& json) {
  std::string bytes;
  nlohmann::json::to_cbor(json, bytes);
  return bytes;
}

nlohmann::json json_from_cbor(std::string_view bytes) {
  return nlohmann::json::from_cbor(bytes.begin(), bytes.end());
}

}  // namespace ferry
