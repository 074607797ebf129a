#include "distckpt/base/json.h"

#include <string>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"

namespace ferry::distckpt {
namespace {

constexpr std::size_t kMaxDepth = 64;

// The memory that the values of one text may take, as it is counted here: that of a header of some
// 400,000 tensors.
constexpr std::size_t kMaxBytes = 360'000'000;
constexpr std::size_t kMemberBytes = 96;   // a node of a std::map with a short key
constexpr std::size_t kElementBytes = 48;  // of an array, while it grows: the old place and the new
constexpr std::size_t kStringBytes = 48;
constexpr std::size_t kShortString = 15;  // lies in the string itself

// The handler of the parser's events. Builds the value in the time of its length, where a callback
// of nlohmann would look through the parent at the end of every object.
template <typename Json>
class Builder {
 public:
  Builder(Json& root, std::string_view source) : root_(root), source_(source) {}

  bool null() { return add(nullptr); }
  bool boolean(bool value) { return add(value); }
  bool number_integer(typename Json::number_integer_t value) { return add(value); }
  bool number_unsigned(typename Json::number_unsigned_t value) { return add(value); }
  bool number_float(typename Json::number_float_t value, const std::string&) { return add(value); }
  bool string(std::string& value) {
    count_string(value);
    return add(std::move(value));
  }
  bool binary(typename Json::binary_t&) { return false; }  // JSON has none
  bool start_object(std::size_t) { return open(Json::object()); }
  bool start_array(std::size_t) { return open(Json::array()); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }

  bool key(std::string& key) {
    count(kMemberBytes);
    count_string(key);
    auto& object = *open_.back().value;
    Json* member = nullptr;
    if constexpr (kIsOrdered) {
      // Its object is a list, and would look through all of it for the key.
      if (open_.back().keys.insert(key).second)
        member = &members(object).emplace_back(std::move(key), nullptr).second;
    } else {
      const auto [at, added] = members(object).try_emplace(std::move(key), nullptr);
      if (added) member = &at->second;
    }
    require(member != nullptr, ErrorKind::kCorrupt, "{}: the key \"{}\" occurs twice", source_,
            key);
    member_ = member;
    return true;
  }

  bool parse_error(std::size_t byte, const std::string&, const nlohmann::json::exception& error) {
    // A number beyond float64 has no place.
    if (error.id == 406)
      fail(ErrorKind::kCorrupt, "{}: is not valid JSON: {}", source_, error.what());
    fail(ErrorKind::kCorrupt, "{}: is not valid JSON at byte {}", source_, byte);
  }

 private:
  static constexpr bool kIsOrdered = std::is_same_v<Json, nlohmann::ordered_json>;

  struct Open {
    Json* value = nullptr;
    std::unordered_set<std::string> keys{};  // of an ordered object
  };

  static typename Json::object_t& members(Json& object) {
    return object.template get_ref<typename Json::object_t&>();
  }

  void count(std::size_t bytes) {
    bytes_ += bytes;
    require(bytes_ <= kMaxBytes, ErrorKind::kCorrupt,
            "{}: JSON of so many values that they would take more than {} MB of memory", source_,
            kMaxBytes / 1'000'000);
  }
  void count_string(const std::string& text) {
    count(kStringBytes + (text.size() > kShortString ? text.size() : 0));
  }

  // Puts the value where it belongs: the root, the last element of an array, the member of the last
  // key. Only the innermost open value grows, so the pointers to those around it stay.
  Json& place(Json value) {
    if (open_.empty()) return root_ = std::move(value);
    auto& parent = *open_.back().value;
    if (!parent.is_array()) return *member_ = std::move(value);
    count(kElementBytes);
    auto& elements = parent.template get_ref<typename Json::array_t&>();
    return elements.emplace_back(std::move(value));
  }
  template <typename Value>
  bool add(Value&& value) {
    place(Json(std::forward<Value>(value)));
    return true;
  }
  bool open(Json value) {
    require(open_.size() < kMaxDepth, ErrorKind::kCorrupt,
            "{}: JSON is nested more than {} levels deep", source_, kMaxDepth);
    count(kMemberBytes);
    open_.push_back({.value = &place(std::move(value))});
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  Json& root_;
  std::string_view source_;
  std::vector<Open> open_;  // outermost first
  Json* member_ = nullptr;  // of the innermost object, that awaits its value
  std::size_t bytes_ = 0;
};

template <typename Json>
Json parse(std::string_view text, std::string_view source) {
  // The parser takes a NUL for the end of its input, and would leave unread what follows.
  const auto nul = text.find('\0');
  require(nul == std::string_view::npos, ErrorKind::kCorrupt, "{}: is not valid JSON at byte {}",
          source, nul);
  Json root;
  Builder<Json> builder(root, source);
  Json::sax_parse(text, &builder);
  return root;
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
