// Bytes as text, and back: base64 (RFC 4648, section 4), and the percent encoding of addresses (RFC
// 3986).
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace ferry {

inline constexpr std::string_view kBase64Digits =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

inline std::string base64_text(std::span<const std::byte> bytes) {
  std::string text;
  text.reserve((bytes.size() + 2) / 3 * 4);
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    const auto some = bytes.subspan(i, std::min<std::size_t>(3, bytes.size() - i));
    std::uint32_t gathered = 0;
    for (std::size_t j = 0; j < 3; ++j)
      gathered = gathered << 8U | (j < some.size() ? std::to_integer<std::uint32_t>(some[j]) : 0U);
    for (std::size_t j = 0; j < 4; ++j)
      text += j > some.size() ? '=' : kBase64Digits[gathered >> (18 - 6 * j) & 63U];
  }
  return text;
}

// The bytes; the padding may be missing. Nothing for a text that is no base64.
inline std::optional<std::string> base64_bytes(std::string_view text) {
  std::array<int, 256> values{};
  values.fill(-1);
  for (std::size_t i = 0; i < kBase64Digits.size(); ++i)
    values[static_cast<unsigned char>(kBase64Digits[i])] = static_cast<int>(i);
  for (int padding = 0; padding < 2 && text.ends_with('='); ++padding) text.remove_suffix(1);
  if (text.size() % 4 == 1) return std::nullopt;
  std::string bytes;
  bytes.reserve(text.size() / 4 * 3 + 2);
  std::uint32_t gathered = 0;
  unsigned bits = 0;
  for (const char digit : text) {
    const auto value = values[static_cast<unsigned char>(digit)];
    if (value < 0) return std::nullopt;
    gathered = gathered << 6U | static_cast<std::uint32_t>(value);
    bits += 6;
    if (bits < 8) continue;
    bits -= 8;
    bytes += static_cast<char>(gathered >> bits & 0xffU);
  }
  return bytes;
}

// `%41` is A; a percent sign without two digits stays. In a query `+` is a space.
inline std::string percent_decoded(std::string_view text, bool plus_is_space = false) {
  std::string decoded;
  for (std::size_t i = 0; i < text.size(); ++i) {
    unsigned byte = 0;
    const auto* const digits = text.data() + i + 1;
    if (text[i] == '%' && i + 2 < text.size() &&
        std::from_chars(digits, digits + 2, byte, 16).ptr == digits + 2) {
      decoded += static_cast<char>(byte);
      i += 2;
    } else {
      decoded += plus_is_space && text[i] == '+' ? ' ' : text[i];
    }
  }
  return decoded;
}

}  // namespace ferry
