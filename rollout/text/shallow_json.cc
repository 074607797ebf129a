#include "rollout/text/shallow_json.h"

namespace ferry::rollout::text {

bool nests_deeply(std::string_view json) {
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < json.size(); ++i) {
    const char c = json[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      if (++depth > kDeepestJson) return true;
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  return false;
}

nlohmann::ordered_json parse_shallow_json(std::string_view json) {
  using nlohmann::ordered_json;
  if (nests_deeply(json)) return ordered_json(ordered_json::value_t::discarded);
  return ordered_json::parse(json, nullptr, false);
}

}  // namespace ferry::rollout::text
