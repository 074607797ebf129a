#include "rollout/text/jinja/lexer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "rollout/text/jinja/value.h"
#include "rollout/text/unicode/unicode.h"

namespace ferry::rollout::text::jinja {
namespace {

using TokenKind = Token::Kind;

std::size_t skip_white_space(std::string_view text, std::size_t at) {
  return at + white_space_prefix(text.substr(at));
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}
bool begins_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

// `source` with \n at the end of every line but the last.
std::string with_plain_lines(std::string_view source) {
  std::string text;
  text.reserve(source.size());
  for (std::size_t i = 0; i < source.size(); ++i) {
    if (source[i] != '\r') {
      text.push_back(source[i]);
    } else if (i + 1 == source.size() || source[i + 1] != '\n') {
      text.push_back('\n');
    }
  }
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : owned_(with_plain_lines(source)), source_(owned_) {}

  std::vector<Token> run() {
    while (at_ < source_.size()) {
      const auto tag = find_tag();
      add_data(tag);
      if (tag == source_.size()) break;
      const char kind = source_[tag + 1];
      advance(tag + 2 + (sign_at(tag + 2) != 0 ? 1U : 0U));
      if (kind == '#') {
        comment();
      } else if (kind == '%' && at_raw()) {
        raw();
      } else {
        const bool block = kind == '%';
        add(block ? TokenKind::kBlockBegin : TokenKind::kVariableBegin, block ? "{%" : "{{");
        inside(block);
      }
    }
    add(TokenKind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void fail_here(const std::string& what) const {
    fail_template(fmt::format("line {}: {}", line_, what));
  }
  void add(TokenKind kind, std::string text) {
    tokens_.push_back({.kind = kind, .text = std::move(text), .line = line_});
  }
  void advance(std::size_t to) {
    line_ += static_cast<int>(std::ranges::count(source_.substr(at_, to - at_), '\n'));
    at_ = to;
  }
  bool sees(std::string_view text) const { return source_.substr(at_).starts_with(text); }
  char sign_at(std::size_t at) const {
    const char c = at < source_.size() ? source_[at] : '\0';
    return c == '-' || c == '+' ? c : '\0';
  }

  std::size_t find_tag() const {
    for (auto at = source_.find('{', at_); at != source_.npos; at = source_.find('{', at + 1)) {
      if (at + 1 == source_.size()) break;
      const char next = source_[at + 1];
      if (next == '{' || next == '%' || next == '#') return at;
    }
    return source_.size();
  }

  // Adds the text before the tag at `tag`, without the white space that the tag removes.
  void add_data(std::size_t tag) {
    auto text = source_.substr(at_, tag - at_);
    if (tag < source_.size()) {
      const char sign = sign_at(tag + 2);
      if (sign == '-') {
        text.remove_suffix(white_space_suffix(text));
      } else if (sign == '\0' && source_[tag + 1] != '{') {  // lstrip_blocks
        const auto line_begin = text.rfind('\n') + 1;
        const bool at_line_begin = line_begin > 0 || line_starting_;
        if (at_line_begin && skip_white_space(text, line_begin) == text.size()) {
          text = text.substr(0, line_begin);
        }
      }
    }
    if (!text.empty()) add(TokenKind::kData, std::string(text));
    advance(tag);
  }

  // Goes behind the end of a tag: -%} takes all white space along, %} (trim_blocks) one line break.
  void end_tag(std::size_t begin, char sign, bool trims) {
    auto to = begin;
    if (sign == '-') {
      to = skip_white_space(source_, to);
    } else if (sign == '\0' && trims && to < source_.size() && source_[to] == '\n') {
      ++to;
    }
    advance(to);
    line_starting_ = source_[to - 1] == '\n';
  }

  void comment() {
    const auto end = source_.find("#}", at_);
    if (end == source_.npos) fail_here("a comment without its #}");
    const char sign = end > at_ ? sign_at(end - 1) : '\0';
    end_tag(end + 2, sign, true);
  }

  bool at_raw() const { return raw_tag_end(at_, "raw").first != 0; }
  // The end of "  NAME -%}" at `at`, and its sign; zero if something else stands there.
  std::pair<std::size_t, char> raw_tag_end(std::size_t at, std::string_view name) const {
    at = skip_white_space(source_, at);
    if (!source_.substr(at).starts_with(name)) return {0, '\0'};
    at = skip_white_space(source_, at + name.size());
    const char sign = sign_at(at);
    if (sign != '\0') ++at;
    return source_.substr(at).starts_with("%}") ? std::pair(at + 2, sign)
                                                : std::pair<std::size_t, char>(0, '\0');
  }
  void raw() {
    const auto [begin, sign] = raw_tag_end(at_, "raw");
    end_tag(begin, sign, true);
    for (auto tag = source_.find("{%", at_); tag != source_.npos;
         tag = source_.find("{%", tag + 1)) {
      const char before = sign_at(tag + 2);
      const auto [end, behind] = raw_tag_end(tag + 2 + (before != '\0' ? 1U : 0U), "endraw");
      if (end == 0) continue;
      add_data(tag);
      end_tag(end, behind, true);
      return;
    }
    fail_here("a raw block without its endraw");
  }

  // The inside of {{ }} or {% %}.
  void inside(bool block) {
    const std::string_view closing = block ? "%}" : "}}";
    std::vector<char> open;
    while (true) {
      advance(skip_white_space(source_, at_));
      if (at_ >= source_.size()) fail_here(fmt::format("a tag without its {}", closing));
      if (open.empty()) {
        const char sign = sign_at(at_);
        const auto end = at_ + (sign != '\0' ? 1U : 0U);
        const bool signed_end = sign == '-' || (sign == '+' && block);
        if ((sign == '\0' || signed_end) && source_.substr(end).starts_with(closing)) {
          add(block ? TokenKind::kBlockEnd : TokenKind::kVariableEnd, std::string(closing));
          end_tag(end + 2, sign, block);
          return;
        }
      }
      const char c = source_[at_];
      if (begins_name(c)) {
        name();
      } else if (is_digit(c)) {
        number();
      } else if (c == '\'' || c == '"') {
        string();
      } else {
        symbol(open);
      }
    }
  }

  void name() {
    auto end = at_;
    while (end < source_.size() && (begins_name(source_[end]) || is_digit(source_[end]))) ++end;
    add(TokenKind::kName, std::string(source_.substr(at_, end - at_)));
    advance(end);
  }

  void number() {
    const auto digits = [&](std::size_t from) {
      while (from < source_.size() && (is_digit(source_[from]) || source_[from] == '_')) ++from;
      return from;
    };
    const auto digit_at = [&](std::size_t at) {
      return at < source_.size() && is_digit(source_[at]);
    };
    auto end = digits(at_);
    bool real = false;
    if (end < source_.size() && source_[end] == '.' && digit_at(end + 1)) {
      end = digits(end + 1);
      real = true;
    }
    if (end < source_.size() && (source_[end] | 0x20) == 'e') {
      const auto from = end + 1 + (sign_at(end + 1) != '\0' ? 1U : 0U);
      if (digit_at(from)) {
        end = digits(from);
        real = true;
      }
    }
    if (end < source_.size() && begins_name(source_[end]))
      fail_here("a number that is not decimal");
    std::string text(source_.substr(at_, end - at_));
    std::erase(text, '_');
    add(real ? TokenKind::kFloat : TokenKind::kInteger, std::move(text));
    advance(end);
  }

  void string() {
    const char quote = source_[at_];
    auto end = at_ + 1;
    while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2U : 1U;
    if (end >= source_.size()) fail_here("a string without its end");
    add(TokenKind::kString, unescaped(source_.substr(at_ + 1, end - at_ - 1)));
    advance(end + 1);
  }

  // Python's "unicode-escape", which leaves unknown escapes as they are.
  std::string unescaped(std::string_view text) const {
    std::string plain;
    for (std::size_t i = 0; i < text.size(); ++i) {
      if (text[i] != '\\') {
        plain.push_back(text[i]);
        continue;
      }
      const char c = text[++i];
      static constexpr std::string_view kNames = "ntrabfv\\'\"", kControls = "\n\t\r\a\b\f\v\\'\"";
      const auto known = kNames.find(c);
      const std::size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
      if (known != kNames.npos) {
        plain.push_back(kControls[known]);
      } else if (digits != 0) {
        append_utf8(code_point(text.substr(i + 1, digits), digits), plain);
        i += digits;
      } else if (c == '\n') {  // a line goes on
      } else if (is_digit(c) || c == 'N') {
        fail_here(fmt::format("the escape \\{} is not supported", c));
      } else {
        plain.push_back('\\');
        plain.push_back(c);
      }
    }
    return plain;
  }
  char32_t code_point(std::string_view text, std::size_t digits) const {
    char32_t c = 0;
    bool ok = text.size() == digits;
    for (const char digit : text) {
      const char lower = static_cast<char>(digit | 0x20);
      const bool letter = lower >= 'a' && lower <= 'f';
      ok = ok && (is_digit(digit) || letter);
      c = c * 16 + static_cast<char32_t>(letter ? lower - 'a' + 10 : digit - '0');
    }
    if (!ok || c > kLastCodePoint || (c >= 0xD800 && c < 0xE000)) {
      fail_here("an escape that is no character");
    }
    return c;
  }

  void symbol(std::vector<char>& open) {
    static constexpr std::array<std::string_view, 26> kSymbols = {
        "**", "//", "==", "!=", ">=", "<=", "+", "-", "*", "/", "%", "~", "[",
        "]",  "(",  ")",  "{",  "}",  ">",  "<", "=", ".", ":", "|", ",", ";"};
    const auto found = std::ranges::find_if(kSymbols, [&](auto text) { return sees(text); });
    if (found == kSymbols.end()) {
      auto end = at_;
      next_code_point(source_, end);
      fail_here(fmt::format("unexpected '{}'", source_.substr(at_, end - at_)));
    }
    const char c = found->front();
    if (c == '(' || c == '[' || c == '{') open.push_back(c == '(' ? ')' : c == '[' ? ']' : '}');
    if (c == ')' || c == ']' || c == '}') {
      if (open.empty() || open.back() != c) fail_here(fmt::format("unexpected '{}'", c));
      open.pop_back();
    }
    add(TokenKind::kOperator, std::string(*found));
    advance(at_ + found->size());
  }

  std::string owned_;
  std::string_view source_;
  std::size_t at_ = 0;
  int line_ = 1;
  bool line_starting_ = true;  // the last tag ended with a line break
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source) {
  return Lexer(source).run();
}

}  // namespace ferry::rollout::text::jinja
