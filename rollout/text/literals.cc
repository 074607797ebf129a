#include "rollout/text/literals.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "distckpt/base/trimmed.h"
#include "rollout/text/shallow_json.h"
#include "rollout/text/unicode/unicode.h"

namespace ferry::rollout::text {
namespace {

using nlohmann::ordered_json;

constexpr std::size_t kLongest = std::size_t{16} << 10;

class LiteralParser {
 public:
  explicit LiteralParser(std::string_view text, bool reads_json = false)
      : rest_(text), reads_json_(reads_json) {}

  // Returns false, with `into` in any state, where the text is no literal.
  bool parse_whole(ordered_json& into) {
    if (!value(into, 0)) return false;
    skip_space();
    return rest_.empty();
  }

  bool parse_calls(std::vector<PythonCall>& calls) {
    for (skip_space(); !rest_.empty(); skip_space()) {
      auto& call = calls.emplace_back(PythonCall{.name = name(/*has_dots=*/true)});
      if (call.name.empty() || !skip("(")) return false;
      while (!skip(")")) {
        skip_space();
        const auto key = name(/*has_dots=*/false);
        if (key.empty() || !skip("=") || !value(call.arguments[key], 0)) return false;
        if (skip(",")) continue;
        if (!skip(")")) return false;
        break;
      }
      skip(",");
    }
    return !calls.empty();
  }

 private:
  std::string name(bool has_dots) {
    const auto is_part = [&](char c) {
      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
             c == '_' || (has_dots && c == '.');
    };
    const auto end = std::ranges::find_if_not(rest_, is_part);
    const auto size = static_cast<std::size_t>(end - rest_.begin());
    std::string found(rest_.substr(0, size));
    rest_.remove_prefix(size);
    return found;
  }

  void skip_space() {
    while (!rest_.empty() && std::string_view(" \t\r\n").find(rest_[0]) != rest_.npos) {
      rest_.remove_prefix(1);
    }
  }
  bool skip(std::string_view part) {
    skip_space();
    if (!rest_.starts_with(part)) return false;
    rest_.remove_prefix(part.size());
    return true;
  }

  bool value(ordered_json& into, int depth) {
    if (depth > kDeepestJson) return false;
    skip_space();
    if (rest_.starts_with('\'') || rest_.starts_with('"')) return string(into);
    if (skip("[")) return list(into, "]", depth);
    if (skip("(")) return list(into, ")", depth);
    if (skip("{")) return dictionary(into, depth);
    if (skip("None")) return into = nullptr, true;
    if (skip("True")) return into = true, true;
    if (skip("False")) return into = false, true;
    if (reads_json_ && skip("null")) return into = nullptr, true;
    if (reads_json_ && skip("true")) return into = true, true;
    if (reads_json_ && skip("false")) return into = false, true;
    return number(into);
  }

  bool number(ordered_json& into) {
    const auto size = std::min(rest_.find_first_not_of("+-.0123456789eE"), rest_.size());
    const auto* const end = rest_.data() + size;
    std::int64_t integer = 0;
    double real = 0;
    if (const auto [stopped, error] = std::from_chars(rest_.data(), end, integer);
        error == std::errc() && stopped == end) {
      into = integer;
    } else if (const auto [real_stopped, real_error] = std::from_chars(rest_.data(), end, real);
               real_error == std::errc() && real_stopped == end) {
      const auto token = rest_.substr(0, size);
      const bool is_integer = token.find_first_not_of("-0123456789") == token.npos &&
                              !token.starts_with('0') && !token.starts_with("-0");
      into = is_integer ? wide_integer(token) : ordered_json(real);
    } else {
      return false;
    }
    rest_.remove_prefix(size);
    return true;
  }

  bool list(ordered_json& into, std::string_view end, int depth) {
    into = ordered_json::array();
    while (!skip(end)) {
      ordered_json item;
      if (!value(item, depth + 1)) return false;
      into.push_back(std::move(item));
      if (!skip(",")) return skip(end) && (end == "]" || into.size() > 1);  // (1) is no tuple
    }
    return true;
  }

  bool dictionary(ordered_json& into, int depth) {
    into = ordered_json::object();
    while (!skip("}")) {
      ordered_json key;
      if (!value(key, depth + 1) || !key.is_string() || !skip(":")) return false;
      if (!value(into[key.get<std::string>()], depth + 1)) return false;
      if (!skip(",")) return skip("}");
    }
    return true;
  }

  bool string(ordered_json& into) {
    const char quote = rest_[0];
    std::string text;
    for (std::size_t at = 1; at < rest_.size(); ++at) {
      const char c = rest_[at];
      if (c == quote) {
        rest_.remove_prefix(at + 1);
        into = std::move(text);
        return true;
      }
      if (c == '\n') return false;
      if (c != '\\') {
        text.push_back(c);
      } else if (++at == rest_.size() || !escape(at, text)) {
        return false;
      }
    }
    return false;
  }

  // The character at `at` follows a backslash; `at` ends on the last one of the escape.
  bool escape(std::size_t& at, std::string& text) {
    const char c = rest_[at];
    static constexpr std::string_view kNames = "\\'\"nrtbfva", kValues = "\\'\"\n\r\t\b\f\v\a";
    if (const auto known = kNames.find(c); known != kNames.npos) {
      text.push_back(kValues[known]);
      return true;
    }
    const std::size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    if (digits == 0) {  // Python keeps the backslash of others
      text += {'\\', c};
      return true;
    }
    const auto code = rest_.substr(at + 1, digits);
    std::uint32_t point = 0;
    const auto [stopped, error] =
        std::from_chars(code.data(), code.data() + code.size(), point, 16);
    if (code.size() != digits || error != std::errc() || stopped != code.data() + digits ||
        point > 0x10FFFF || (point >= 0xD800 && point < 0xE000)) {
      return false;
    }
    append_utf8(point, text);
    at += digits;
    return true;
  }

  std::string_view rest_;
  bool reads_json_;
};

class GemmaParser {
 public:
  GemmaParser(std::string_view text, std::string_view quote) : rest_(text), quote_(quote) {}

  // Returns false, with `into` in any state, where the text is no object.
  bool parse_whole(ordered_json& into) {
    if (!skip("{") || !object(into, 0)) return false;
    return trimmed(rest_).empty();
  }

 private:
  bool skip(std::string_view part) {
    const auto text = rest_.substr(std::min(rest_.find_first_not_of(" \t\r\n"), rest_.size()));
    if (!text.starts_with(part)) return false;
    rest_ = text.substr(part.size());
    return true;
  }

  bool object(ordered_json& into, int depth) {
    into = ordered_json::object();
    while (!skip("}")) {
      std::string key;
      if (skip(quote_)) {
        if (!string(key) || !skip(":")) return false;
      } else {
        const auto end = rest_.find(':');
        if (end == rest_.npos) return false;
        key = trimmed(rest_.substr(0, end));
        rest_.remove_prefix(end + 1);
      }
      if (!value(into[key], depth + 1)) return false;
      if (!skip(",")) return skip("}");
    }
    return true;
  }

  bool list(ordered_json& into, int depth) {
    into = ordered_json::array();
    while (!skip("]")) {
      if (!value(into.emplace_back(), depth + 1)) return false;
      if (!skip(",")) return skip("]");
    }
    return true;
  }

  bool value(ordered_json& into, int depth) {
    if (depth >= kDeepestJson) return false;
    if (skip("{")) return object(into, depth);
    if (skip("[")) return list(into, depth);
    if (skip(quote_)) {
      std::string text;
      if (!string(text)) return false;
      into = std::move(text);
      return true;
    }
    const auto end = std::min(rest_.find_first_of(",}]"), rest_.size());
    const auto word = trimmed(rest_.substr(0, end));
    rest_.remove_prefix(end);
    into = bare(word);
    return !word.empty();
  }

  static ordered_json bare(std::string_view word) {
    for (const auto* const null : {"null", "None", "none", "nil"})
      if (word == null) return nullptr;
    auto parsed = parse_exact_json(word);
    const bool is_text = parsed.is_discarded() || parsed.is_string() || parsed.is_structured();
    return is_text ? ordered_json(std::string(word)) : parsed;
  }

  // Up to the second quote.
  bool string(std::string& into) {
    const auto end = rest_.find(quote_);
    if (end == rest_.npos) return false;
    into = rest_.substr(0, end);
    rest_.remove_prefix(end + quote_.size());
    return true;
  }

  std::string_view rest_;
  std::string_view quote_;
};

}  // namespace

ordered_json parse_python_literal(std::string_view text) {
  ordered_json parsed;
  const bool read = text.size() <= kLongest && LiteralParser(trimmed(text)).parse_whole(parsed);
  return read ? parsed : ordered_json(ordered_json::value_t::discarded);
}

std::optional<std::vector<PythonCall>> parse_python_calls(std::string_view text) {
  std::vector<PythonCall> calls;
  if (!LiteralParser(text, /*reads_json=*/true).parse_calls(calls)) return std::nullopt;
  return calls;
}

ordered_json parse_gemma_object(std::string_view text, std::string_view quote) {
  ordered_json parsed;
  return GemmaParser(text, quote).parse_whole(parsed)
             ? parsed
             : ordered_json(ordered_json::value_t::discarded);
}

}  // namespace ferry::rollout::text
