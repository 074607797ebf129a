// The parts of the format of an answer, as rollout/grammar/format.h reads them.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "serve/api/api_error.h"

namespace ferry::serve {

inline ordered_json text_format(const std::string& text) {
  return {{"type", "const_string"}, {"value", text}};
}
inline ordered_json schema_format(const ordered_json& schema, const std::string& at = "") {
  return {{"type", "json_schema"}, {"json_schema", schema}, {"at", at}};
}
inline ordered_json list_format(const char* type, ordered_json elements) {
  return {{"type", type}, {"elements", std::move(elements)}};
}
inline ordered_json sequence_of(std::vector<ordered_json> parts) {
  return list_format("sequence", ordered_json(std::move(parts)));
}

}  // namespace ferry::serve
