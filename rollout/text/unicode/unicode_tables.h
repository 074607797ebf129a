// Every character as the tokenizers package 0.23.3 knows it: the text of unicode_data.txt, read.
// The parts of the package stand on different versions of Unicode, and so do these tables: the sets
// of regular expressions on 16.0 (as Oniguruma 6.9.10), RustWord, RustNumeric, WhiteSpace and lower
// case on 17.0, the normal forms on 9.0, Punctuation on 8.0.
//
// Notation, in hexadecimal: "9-D 20" are ranges, "C0=41.300" maps a character to others, "41-5A=61"
// and "100-12E/2=101" map each of a run, one or two apart, to one as far from 61 or 101. A '='
// alone goes on behind the character before; "!" ends a decomposition that NFC does not undo.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ferry::rollout::text {

struct CodePointRange {
  char32_t first = 0;
  char32_t last = 0;
};

struct CharacterMapping {
  char32_t from = 0;
  std::u32string to{};
  bool composes = true;  // NFC makes `from` of `to`
};

namespace unicode_data {

struct NamedSet {
  std::string_view name{};        // a script ("Han"), or one of our own ("Word")
  std::string_view categories{};  // their characters, but for `difference`
  std::string_view difference{};  // ranges that belong to one of the two only
};

// The table behind its name:
//   CategoryNames     "Lu Ll ..."
//   CategoryRuns      "b26.": 26 of the second, one of none
//   Canonical         decompositions, one step, without Hangul
//   Compatibility     whole ones, where the canonical one differs
//   Lowercase         of each character that is not its own
//   CombiningClasses  "1: 334-338 ... 7: 93C ...", the others zero
std::string_view table(std::string_view name);
std::vector<NamedSet> sets();

}  // namespace unicode_data

struct NamedRanges {
  std::string_view name{};
  std::vector<CodePointRange> ranges{};
};
struct CombiningRange {
  CodePointRange range{};
  std::uint8_t combining_class = 0;
};

std::vector<NamedRanges> category_ranges();  // by general category, "Lu"
std::vector<CodePointRange> parse_ranges(std::string_view text);
std::vector<CharacterMapping> parse_mappings(std::string_view text);  // in ascending order
std::vector<CombiningRange> combining_ranges();

}  // namespace ferry::rollout::text
