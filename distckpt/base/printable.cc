#include "distckpt/base/printable.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

namespace ferry {
namespace {

struct CodePoint {
  char32_t value = 0;
  std::size_t bytes = 0;  // 0: not UTF-8
};

// The code point that `text` begins with.
CodePoint first_code_point(std::string_view text) {
  const auto at = [&](std::size_t i) { return static_cast<std::uint8_t>(text[i]); };
  const auto lead = at(0);
  if (lead < 0x80) return {lead, 1};
  const std::size_t bytes = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || text.size() < bytes) return {};
  char32_t value = lead & (0xFFU >> (bytes + 1));
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((at(i) & 0xC0U) != 0x80) return {};
    value = value << 6 | (at(i) & 0x3FU);
  }
  constexpr char32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = value >= 0xD800 && value <= 0xDFFF;
  if (value < kLeast[bytes] || value > 0x10FFFF || surrogate) return {};
  return {value, bytes};
}

// Control characters (C0, DEL, C1), line separators, and what turns the direction of writing.
bool is_unprintable(char32_t c) {
  return c < 0x20 || (c >= 0x7F && c < 0xA0) || c == 0x061C || (c >= 0x200E && c <= 0x200F) ||
         (c >= 0x2028 && c <= 0x202E) || (c >= 0x2066 && c <= 0x2069);
}

bool is_plain(char c) {
  return c >= 0x20 && c < 0x7F;
}

std::string escape(std::string_view text) {
  if (std::ranges::all_of(text, is_plain)) return std::string(text);
  std::string escaped;
  while (!text.empty()) {
    const auto [value, bytes] = first_code_point(text);
    if (bytes == 0) {
      escaped += fmt::format("\\x{:02x}", static_cast<std::uint8_t>(text.front()));
    } else if (!is_unprintable(value)) {
      escaped += text.substr(0, bytes);
    } else if (value == '\n') {
      escaped += "\\n";
    } else {
      const auto number = static_cast<std::uint32_t>(value);
      escaped +=
          value < 0x100 ? fmt::format("\\x{:02x}", number) : fmt::format("\\u{:04x}", number);
    }
    text.remove_prefix(std::max<std::size_t>(bytes, 1));
  }
  return escaped;
}

bool is_continuation(char c) {
  return (static_cast<std::uint8_t>(c) & 0xC0U) == 0x80;
}

}  // namespace

std::string printable(std::string_view text, std::size_t max_bytes) {
  if (text.size() <= max_bytes) return escape(text);
  // A code point is not cut apart.
  auto head = max_bytes / 2;
  for (int i = 0; i < 3 && head > 0 && is_continuation(text[head]); ++i) --head;
  auto tail = text.size() - max_bytes / 2;
  for (int i = 0; i < 3 && tail < text.size() && is_continuation(text[tail]); ++i) ++tail;
  return fmt::format("{}[... {} bytes ...]{}", escape(text.substr(0, head)), tail - head,
                     escape(text.substr(tail)));
}

std::string shell_quoted(std::string_view text) {
  constexpr std::string_view kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:=,+@%";
  if (!text.empty() && text.find_first_not_of(kPlain) == std::string_view::npos)
    return std::string(text);
  const bool has_controls = std::ranges::any_of(
      text, [](char c) { return static_cast<std::uint8_t>(c) < 0x20 || c == 0x7F; });
  std::string quoted = has_controls ? "$'" : "'";
  for (const char c : text) {
    if (c == '\'') {
      quoted += has_controls ? "\\'" : "'\\''";
    } else if (has_controls && c == '\\') {
      quoted += "\\\\";
    } else if (static_cast<std::uint8_t>(c) < 0x20 || c == 0x7F) {
      quoted += fmt::format("\\x{:02x}", static_cast<std::uint8_t>(c));
    } else {
      quoted += c;
    }
  }
  return quoted + "'";
}

}  // namespace ferry
