#include "rollout/text/shallow_json.h"

#include "distckpt/base/error.h"
#include "distckpt/base/json.h"

namespace ferry::rollout::text {
namespace {

// nlohmann looks through an ordered object for each of its members, which takes minutes for those
// of a long text.
constexpr std::size_t kShortJson = std::size_t{16} << 10;

}  // namespace

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
  ordered_json none(ordered_json::value_t::discarded);
  if (nests_deeply(json)) return none;
  if (json.size() <= kShortJson) return ordered_json::parse(json, nullptr, false);
  try {
    return distckpt::parse_ordered_json(json, "JSON");
  } catch (const Error&) {
    return none;
  }
}

}  // namespace ferry::rollout::text
