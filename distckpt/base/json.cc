#include "distckpt/base/json.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <limits>
#include <string>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"

namespace ferry::distckpt {
namespace {

// Journals of sessions hold answers of programs, which nest up to 100 deep.
constexpr std::size_t kMaxDepth = 128;

// The memory that the values of one text may take, as it is counted here: that of a header of some
// 400,000 tensors.
constexpr std::size_t kMaxBytes = 360'000'000;
constexpr std::size_t kMemberBytes = 96;   // a node of a std::map with a short key
constexpr std::size_t kElementBytes = 48;  // of an array, while it grows: the old place and the new
constexpr std::size_t kStringBytes = 48;
constexpr std::size_t kShortString = 15;  // lies in the string itself

// A word of Python's json that stands for a number.
struct NumberWord {
  std::string_view word;
  double value;
};
constexpr std::array<NumberWord, 3> kNumberWords{{
    {"NaN", std::numeric_limits<double>::quiet_NaN()},
    {"Infinity", std::numeric_limits<double>::infinity()},
    {"-Infinity", -std::numeric_limits<double>::infinity()},
}};

// The text with a 0 and blanks in place of each word of Python's, so that it is JSON and every
// other byte stays where it was.
struct WithoutWords {
  std::string text;
  std::vector<std::pair<std::size_t, double>> words{};  // how many numbers stand before, its value
};

WithoutWords without_words(std::string_view text) {
  WithoutWords result{.text = std::string(text)};
  const auto of_a_token = [](char letter) {
    return std::isalnum(static_cast<unsigned char>(letter)) != 0 || letter == '+' ||
           letter == '-' || letter == '.';
  };
  std::size_t numbers = 0;
  for (std::size_t at = 0; at < text.size();) {
    if (text[at] == '"') {
      for (++at; at < text.size() && text[at] != '"'; ++at) at += text[at] == '\\' ? 1 : 0;
      ++at;
      continue;
    }
    auto end = at;
    while (end < text.size() && of_a_token(text[end])) ++end;
    const auto token = text.substr(at, end - at);
    const auto* const word = std::ranges::find(kNumberWords, token, &NumberWord::word);
    if (word != kNumberWords.end()) {
      result.text.replace(at, token.size(), token.size(), ' ');
      result.text[at] = '0';
      result.words.emplace_back(numbers, word->value);
    }
    const bool is_number =
        !token.empty() && (token[0] == '-' || (token[0] >= '0' && token[0] <= '9'));
    if (word != kNumberWords.end() || is_number) ++numbers;
    at = std::max(end, at + 1);
  }
  return result;
}

// The handler of the parser's events. Builds the value in the time of its length, where a callback
// of nlohmann would look through the parent at the end of every object.
template <typename Json>
class Builder {
 public:
  using Words = std::vector<std::pair<std::size_t, double>>;  // as in WithoutWords

  Builder(Json& root, std::string_view source, const Words& words)
      : root_(root), source_(source), word_(words.begin()), end_(words.end()) {}

  bool null() { return add(nullptr); }
  bool boolean(bool value) { return add(value); }
  bool number_integer(typename Json::number_integer_t value) { return add_number(value); }
  bool number_unsigned(typename Json::number_unsigned_t value) { return add_number(value); }
  bool number_float(typename Json::number_float_t value, const std::string&) {
    return add_number(value);
  }
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
    if constexpr (kIsOrdered) {
      // Its object is a list, and would look through all of it for the key.
      require_new(open_.back().keys.insert(key).second, key);
      member_ = &members(object).emplace_back(std::move(key), nullptr).second;
    } else {
      const auto [at, added] = members(object).try_emplace(std::move(key), nullptr);
      require_new(added, at->first);
      member_ = &at->second;
    }
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

  void require_new(bool is_new, const std::string& key) const {
    require(is_new, ErrorKind::kCorrupt, "{}: the key \"{}\" occurs twice", source_, key);
  }

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
  template <typename Value>
  bool add_number(Value value) {
    if (word_ == end_ || word_->first != numbers_++) return add(value);
    return add((word_++)->second);
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
  std::size_t numbers_ = 0;              // until the last word
  typename Words::const_iterator word_;  // the next one
  typename Words::const_iterator end_;
};

// The handler that builds the members of the outermost object one after another.
class MemberBuilder {
 public:
  using Json = nlohmann::json;
  using Visit = std::function<void(std::string& key, Json& value)>;

  MemberBuilder(std::string_view source, const Visit& visit)
      : source_(source), visit_(visit), value_builder_(value_, source, kNoWords) {}

  bool null() { return scalar(value_builder_.null()); }
  bool boolean(bool value) { return scalar(value_builder_.boolean(value)); }
  bool number_integer(Json::number_integer_t value) {
    return scalar(value_builder_.number_integer(value));
  }
  bool number_unsigned(Json::number_unsigned_t value) {
    return scalar(value_builder_.number_unsigned(value));
  }
  bool number_float(Json::number_float_t value, const std::string& text) {
    return scalar(value_builder_.number_float(value, text));
  }
  bool string(std::string& value) { return scalar(value_builder_.string(value)); }
  bool binary(Json::binary_t&) { return false; }
  bool start_object(std::size_t size) { return depth_++ == 0 || value_builder_.start_object(size); }
  bool start_array(std::size_t size) {
    require_object();
    ++depth_;
    return value_builder_.start_array(size);
  }
  bool end_object() { return --depth_ == 0 || end(value_builder_.end_object()); }
  bool end_array() {
    --depth_;
    return end(value_builder_.end_array());
  }
  bool key(std::string& key) {
    if (depth_ > 1) return value_builder_.key(key);
    key_ = std::move(key);
    return true;
  }
  bool parse_error(std::size_t byte,
                   const std::string& token,
                   const nlohmann::json::exception& error) {
    return value_builder_.parse_error(byte, token, error);
  }

 private:
  static inline const Builder<Json>::Words kNoWords{};

  void require_object() const {
    require(depth_ > 0, ErrorKind::kCorrupt, "{}: is not a JSON object", source_);
  }
  bool scalar(bool built) {
    require_object();
    return end(built);
  }
  bool end(bool built) {
    if (depth_ == 1) visit_(key_, value_);
    return built;
  }

  std::string_view source_;
  const Visit& visit_;
  std::string key_{};
  Json value_{};
  Builder<Json> value_builder_;
  int depth_ = 0;  // open values
};

// The parser takes a NUL for the end of its input, and would leave unread what follows.
void require_no_nul(std::string_view text, std::string_view source) {
  const auto nul = text.find('\0');
  require(nul == std::string_view::npos, ErrorKind::kCorrupt, "{}: is not valid JSON at byte {}",
          source, nul);
}

template <typename Json>
Json parse(std::string_view text,
           std::string_view source,
           const typename Builder<Json>::Words& words = {}) {
  require_no_nul(text, source);
  Json root;
  Builder<Json> builder(root, source, words);
  Json::sax_parse(text, &builder);
  return root;
}

template <typename Json>
Json parse_python(std::string_view text, std::string_view source) {
  const auto without = without_words(text);
  return parse<Json>(without.text, source, without.words);
}

std::string_view word_of(double value) {
  if (std::isnan(value)) return kNumberWords[0].word;
  return kNumberWords[value > 0 ? 1 : 2].word;
}

template <typename Json>
void write(const Json& value, std::optional<int> indent, int depth, std::string& text) {
  if (value.is_number_float() && !std::isfinite(value.template get<double>())) {
    text += word_of(value.template get<double>());
    return;
  }
  if (!value.is_structured() || value.empty()) {
    text += value.dump();
    return;
  }
  const auto new_line = [&](int levels) {
    if (indent)
      text.append(1, '\n').append(
          static_cast<std::size_t>(levels) * static_cast<std::size_t>(*indent), ' ');
  };
  text += value.is_object() ? '{' : '[';
  bool first = true;
  for (const auto& [key, member] : value.items()) {
    if (!first) text += ',';
    first = false;
    new_line(depth + 1);
    if (value.is_object()) text += Json(key).dump() + (indent ? ": " : ":");
    write(member, indent, depth + 1, text);
  }
  new_line(depth);
  text += value.is_object() ? '}' : ']';
}

template <typename Json>
std::string written(const Json& value, std::optional<int> indent) {
  std::string text;
  write(value, indent, 0, text);
  return text;
}

}  // namespace

nlohmann::json parse_json(std::string_view text, std::string_view source) {
  return parse<nlohmann::json>(text, source);
}

void visit_json_members(std::string_view text,
                        std::string_view source,
                        const std::function<void(std::string& key, nlohmann::json& value)>& visit) {
  require_no_nul(text, source);
  MemberBuilder builder(source, visit);
  nlohmann::json::sax_parse(text, &builder);
}

nlohmann::json json_or_discarded(std::string_view text) {
  return nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
}

nlohmann::ordered_json parse_ordered_json(std::string_view text, std::string_view source) {
  return parse<nlohmann::ordered_json>(text, source);
}

nlohmann::json parse_python_json(std::string_view text, std::string_view source) {
  return parse_python<nlohmann::json>(text, source);
}

nlohmann::ordered_json parse_ordered_python_json(std::string_view text, std::string_view source) {
  return parse_python<nlohmann::ordered_json>(text, source);
}

std::string python_json(const nlohmann::json& value, std::optional<int> indent) {
  return written(value, indent);
}

std::string python_json(const nlohmann::ordered_json& value, std::optional<int> indent) {
  return written(value, indent);
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
  // Headers have hundreds of thousands of numbers: none is written as text unless it is at fault.
  if (!value.is_number_integer()) {
    fail(ErrorKind::kCorrupt, "{}: {} is {}, an integer is expected", source, key,
         python_json(value));
  }
  // A number beyond int64 is kept unsigned by the parser.
  if (value.is_number_unsigned() &&
      value.get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX))
    fail(ErrorKind::kCorrupt, "{}: {} is {}, which is too large", source, key, value.dump());
  return value.get<std::int64_t>();
}

std::string json_string(const nlohmann::json& value,
                        std::string_view key,
                        std::string_view source) {
  if (!value.is_string()) {
    fail(ErrorKind::kCorrupt, "{}: {} is {}, a string is expected", source, key,
         python_json(value));
  }
  return value.get<std::string>();
}

std::string json_string_at(const nlohmann::json& object,
                           std::string_view key,
                           std::string_view source) {
  return json_string(json_at(object, key, source), key, source);
}

Dims json_dims_at(const nlohmann::json& object, std::string_view key, std::string_view source) {
  const auto& value = json_at(object, key, source);
  require(value.is_array(), ErrorKind::kCorrupt, "{}: {} is not a list", source, key);
  require(value.size() <= kMaxRank, ErrorKind::kCorrupt,
          "{}: {} has {} dimensions, at most {} are handled", source, key, value.size(), kMaxRank);
  Dims dims;
  for (const auto& dim : value) {
    const auto size = json_int(dim, key, source);
    require(size >= 0, ErrorKind::kCorrupt, "{}: {} holds {}", source, key, size);
    dims.push_back(size);
  }
  return dims;
}

void require_json_format(const nlohmann::json& object,
                         std::string_view format,
                         std::string_view source) {
  const auto found = json_string_at(object, "format", source);
  require(found == format, ErrorKind::kLayout, "{}: the format is \"{}\", expected \"{}\"", source,
          found, format);
}

}  // namespace ferry::distckpt
