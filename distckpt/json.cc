#include "distckpt/json.h"

#include <set>
#include <vector>

#include "distckpt/error.h"

namespace ferry::distckpt {
namespace {

constexpr int kMaxDepth = 64;

template <typename Json>
Json parse(std::string_view text, std::string_view source) {
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  // The parser takes a NUL for the end of its input, and would leave unread what follows.
  const auto nul = text.find('\0');
  require(nul == std::string_view::npos, ErrorKind::kCorrupt, "{}: is not valid JSON at byte {}",
          source, nul);
  const auto callback = [&](int depth, typename Json::parse_event_t event, Json& parsed) {
    require(depth <= kMaxDepth, ErrorKind::kCorrupt, "{}: JSON is nested more than {} levels deep",
            source, kMaxDepth);
    if (event == Json::parse_event_t::object_start) {
      keys.emplace_back();
    } else if (event == Json::parse_event_t::object_end) {
      keys.pop_back();
    } else if (event == Json::parse_event_t::key) {
      const auto& key = parsed.template get_ref<const std::string&>();
      require(keys.back().insert(key).second, ErrorKind::kCorrupt,
              "{}: the key \"{}\" occurs twice", source, key);
    }
    return true;
  };
  try {
    return Json::parse(text, callback);
  } catch (const nlohmann::json::parse_error& error) {
    fail(ErrorKind::kCorrupt, "{}: is not valid JSON at byte {}", source, error.byte);
  } catch (const nlohmann::json::exception& error) {
    fail(ErrorKind::kCorrupt, "{}: is not valid JSON: {}", source, error.what());
  }
}

}  // namespace

nlohmann::json parse_json(std::string_view text, std::string_view source) {
  return parse<nlohmann::json>(text, source);
}

nlohmann::ordered_json parse_ordered_json(std::string_view text, std::string_view source) {
  return parse<nlohmann::ordered_json>(text, source);
}

const nlohmann::json& json_at(const nlohmann::json& object,
                              std::string_view key,
                              std::string_view source) {
  require(object.is_object(), ErrorKind::kCorrupt, "{}: not a JSON object", source);
  const auto found = object.find(std::string(key));
  require(found != object.end(), ErrorKind::kCorrupt, "{}: the key \"{}\" is missing", source, key);
  return *found;
}

std::int64_t json_int(const nlohmann::json& value, std::string_view key, std::string_view source) {
  require(value.is_number_integer(), ErrorKind::kCorrupt, "{}: {} is {}, an integer is expected",
          source, key, value.dump());
  // A number beyond int64 is kept unsigned by the parser.
  require(!value.is_number_unsigned() ||
              value.get<std::uint64_t>() <= static_cast<std::uint64_t>(INT64_MAX),
          ErrorKind::kCorrupt, "{}: {} is {}, which is too large", source, key, value.dump());
  return value.get<std::int64_t>();
}

std::string json_string(const nlohmann::json& value,
                        std::string_view key,
                        std::string_view source) {
  require(value.is_string(), ErrorKind::kCorrupt, "{}: {} is {}, a string is expected", source, key,
          value.dump());
  return value.get<std::string>();
}

}  // namespace ferry::distckpt
