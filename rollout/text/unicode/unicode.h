// UTF-8, sets of characters by name, upper and lower case, and the four normal forms. All agree
// with the tokenizers package; unicode_tables.h names its versions of Unicode.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "rollout/text/unicode/unicode_tables.h"

namespace ferry::rollout::text {

inline constexpr char32_t kReplacementCharacter = 0xFFFD;
inline constexpr char32_t kLastCodePoint = 0x10FFFF;

// The bytes of a character, by its first one. The text is valid UTF-8.
inline std::size_t utf8_length(char first) {
  const auto byte = static_cast<unsigned char>(first);
  return byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

// Returns the character at `at`, and moves `at` behind it. The text is valid UTF-8, `at` inside it.
inline char32_t next_code_point(std::string_view text, std::size_t& at) {
  const auto byte = [&](std::size_t i) {
    return static_cast<char32_t>(static_cast<unsigned char>(text[at + i]));
  };
  const char32_t first = byte(0);
  if (first < 0x80) {
    at += 1;
    return first;
  }
  char32_t c = 0;
  if (first < 0xE0) {
    c = (first & 0x1F) << 6 | (byte(1) & 0x3F);
    at += 2;
  } else if (first < 0xF0) {
    c = (first & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F);
    at += 3;
  } else {
    c = (first & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 | (byte(3) & 0x3F);
    at += 4;
  }
  return c;
}

// The beginning of the character before `at`, which is not zero.
inline std::size_t previous_boundary(std::string_view text, std::size_t at) {
  do {
    --at;
  } while ((static_cast<unsigned char>(text[at]) & 0xC0) == 0x80);
  return at;
}

void append_utf8(char32_t c, std::string& text);
std::u32string to_code_points(std::string_view text);

// The length of the character at the front of `text`, or (`valid` false) of the longest beginning
// of one that is broken off. One U+FFFD replaces such a beginning, in Python's errors="replace" and
// in Unicode's "substitution of maximal subparts". `complete` is false if more bytes could follow.
struct Utf8Head {
  std::size_t length = 0;
  bool valid = false;
  bool complete = true;
};
Utf8Head utf8_head(std::string_view text);
bool is_valid_utf8(std::string_view text);

// `text` with U+FFFD for each part that is not UTF-8.
std::string replace_invalid_utf8(std::string_view text);

// A set of characters: pages of 256 bits each, of which equal ones are shared, up to the last that
// is not empty: a set of one letter takes some hundred bytes. Regular expressions of requests have
// thousands of them.
class CodePointSet {
 public:
  CodePointSet() = default;
  explicit CodePointSet(std::vector<CodePointRange> ranges);  // in any order, also overlapping

  // A general category ("L", "Lu"), a script ("Han") or another set of unicode_tables.h; null if
  // the name is unknown.
  static const CodePointSet* named(std::string_view name);

  bool contains(char32_t c) const {
    return c >> 8 < page_of_.size() && (pages_[page_of_[c >> 8]][c >> 6 & 3] >> (c & 63) & 1) != 0;
  }
  const std::vector<CodePointRange>& ranges() const { return ranges_; }  // sorted, apart
  CodePointSet inverted() const;
  CodePointSet united(const CodePointSet& other) const;
  CodePointSet intersected(const CodePointSet& other) const;

 private:
  using Page = std::array<std::uint64_t, 4>;

  std::vector<CodePointRange> ranges_;
  std::vector<std::uint16_t> page_of_;  // in pages_
  std::vector<Page> pages_;             // the first is empty
};

// Bytes of white space at the front of `text`, and at its end.
std::size_t white_space_prefix(std::string_view text);
std::size_t white_space_suffix(std::string_view text);

enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };

std::string normalize(std::string_view text, NormalForm form);
std::string lowercase(std::string_view text);  // each character by itself: no final sigma
// Each character by itself; right for all but some hundred that have no upper case of their own.
std::string uppercase(std::string_view text);

}  // namespace ferry::rollout::text
