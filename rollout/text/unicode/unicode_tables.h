// What the tokenizers package 0.23.3 knows of every character, as generated tables. Its parts stand
// on different versions of Unicode, and so do these: the sets of regular expressions on 16.0 (as
// Oniguruma 6.9.10), RustNumeric, WhiteSpace and the lower case on 17.0, the normal forms on 9.0,
// Punctuation on 8.0.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace ferry::rollout::text {

struct CodePointRange {
  char32_t first = 0;
  char32_t last = 0;
};

struct NamedRanges {
  std::string_view name{};  // a general category ("Lu"), a script ("Han"), or one of our own
  std::span<const CodePointRange> ranges{};
};

struct Composition {
  char32_t first = 0;
  char32_t second = 0;
  char32_t composed = 0;
};

struct CombiningRange {
  char32_t first = 0;
  char32_t last = 0;
  std::uint8_t combining_class = 0;
};

struct UnicodeTables {
  std::span<const NamedRanges> sets{};
  // Mappings: a character, how many it becomes, and those; then the next one. Without Hangul.
  std::span<const char32_t> canonical{};
  std::span<const char32_t> compatibility{};  // where it differs from the canonical one
  std::span<const char32_t> lowercase{};
  std::span<const Composition> compositions{};
  std::span<const CombiningRange> combining{};
};

const UnicodeTables& unicode_tables();

}  // namespace ferry::rollout::text
