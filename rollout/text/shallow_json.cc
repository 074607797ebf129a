#include "rollout/text/shallow_json.h"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/json.h"

namespace ferry::rollout::text {
namespace {

// nlohmann looks through an ordered object for each of its members, which takes minutes for those
// of a long text.
constexpr std::size_t kShortJson = std::size_t{16} << 10;

// -2^63 has 19 digits.
constexpr std::ptrdiff_t kWideDigits = 19;

using nlohmann::ordered_json;

// The handler of the parser's events that finds integers beyond 64 bits: numbers that it takes for
// floating-point ones, and that are written as integers.
class WideIntegerFinder : public nlohmann::json_sax<ordered_json> {
 public:
  using Visit = std::function<bool(const WideIntegerPlace& place)>;

  explicit WideIntegerFinder(const Visit& visit) : visit_(visit) {}

  bool null() override { return next(); }
  bool boolean(bool) override { return next(); }
  bool number_integer(number_integer_t) override { return next(); }
  bool number_unsigned(number_unsigned_t) override { return next(); }
  bool number_float(number_float_t, const string_t& token) override {
    const bool is_integer = token.find_first_of(".eE") == string_t::npos;
    return (!is_integer || visit_({.path = path(), .digits = token})) && next();
  }
  bool string(string_t&) override { return next(); }
  bool binary(binary_t&) override { return false; }  // JSON has none
  bool start_object(std::size_t) override { return open(false); }
  bool start_array(std::size_t) override { return open(true); }
  bool key(string_t& key) override {
    open_.back().key = std::move(key);
    return true;
  }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool parse_error(std::size_t, const std::string&, const nlohmann::json::exception&) override {
    return false;
  }

 private:
  struct Open {
    bool is_array = false;
    std::size_t index = 0;
    std::string key{};
  };

  bool open(bool is_array) {
    open_.push_back({.is_array = is_array});
    return true;
  }
  bool close() {
    open_.pop_back();
    return next();
  }
  bool next() {
    if (!open_.empty()) ++open_.back().index;
    return true;
  }
  std::vector<std::string> path() const {
    std::vector<std::string> path;
    for (const auto& one : open_)
      path.push_back(one.is_array ? std::to_string(one.index) : one.key);
    return path;
  }

  const Visit& visit_;
  std::vector<Open> open_;  // outermost first
};

// Null if there is none, as where a key occurs twice.
ordered_json* value_at(ordered_json& value, const std::vector<std::string>& path) {
  auto* at = &value;
  for (const auto& step : path) {
    if (at->is_object()) {
      const auto found = at->find(step);
      if (found == at->end()) return nullptr;
      at = &*found;
      continue;
    }
    std::size_t index = 0;
    std::from_chars(step.data(), step.data() + step.size(), index);
    if (!at->is_array() || index >= at->size()) return nullptr;
    at = &(*at)[index];
  }
  return at;
}

void write_text(const ordered_json& value, std::string& text) {
  if (is_wide_integer(value)) {
    text.append(value.get_binary().begin(), value.get_binary().end());
    return;
  }
  const auto dump = [](const ordered_json& one) {
    return one.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
  };
  if (!value.is_structured()) {
    text += dump(value);
    return;
  }
  text += value.is_object() ? '{' : '[';
  bool first = true;
  for (const auto& [key, member] : value.items()) {
    if (!std::exchange(first, false)) text += ',';
    if (value.is_object()) text += dump(key) + ':';
    write_text(member, text);
  }
  text += value.is_object() ? '}' : ']';
}

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
  ordered_json none(ordered_json::value_t::discarded);
  if (nests_deeply(json)) return none;
  if (json.size() <= kShortJson) return ordered_json::parse(json, nullptr, false);
  try {
    return distckpt::parse_ordered_json(json, "JSON");
  } catch (const Error&) {
    return none;
  }
}

ordered_json wide_integer(std::string_view digits) {
  return ordered_json::binary(std::vector<std::uint8_t>(digits.begin(), digits.end()));
}

bool is_wide_integer(const ordered_json& value) {
  return value.is_binary();
}

void visit_wide_integers(std::string_view json, const WideIntegerFinder::Visit& visit) {
  std::ptrdiff_t run = 0;
  const bool has_long_number = std::ranges::any_of(json, [&](char c) {
    run = c >= '0' && c <= '9' ? run + 1 : 0;
    return run >= kWideDigits;
  });
  if (!has_long_number) return;
  WideIntegerFinder finder(visit);
  ordered_json::sax_parse(json, &finder);
}

void keep_wide_integers(std::string_view json,
                        ordered_json& value,
                        const std::vector<std::string>& members) {
  visit_wide_integers(json, [&](const WideIntegerPlace& place) {
    const bool is_asked =
        members.empty() ||
        (!place.path.empty() && std::ranges::find(members, place.path.front()) != members.end());
    if (!is_asked) return true;
    auto* const at = value_at(value, place.path);
    if (at != nullptr && at->is_number_float()) *at = wide_integer(place.digits);
    return true;
  });
}

ordered_json parse_exact_json(std::string_view json) {
  auto value = parse_shallow_json(json);
  if (!value.is_discarded()) keep_wide_integers(json, value);
  return value;
}

std::string json_text(const ordered_json& value) {
  std::string text;
  write_text(value, text);
  return text;
}

}  // namespace ferry::rollout::text
