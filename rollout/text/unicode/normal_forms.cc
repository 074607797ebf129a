// The normal forms of Unicode's annex 15, lower and upper case.
#include <algorithm>
#include <array>
#include <unordered_map>

#include "rollout/text/unicode/unicode.h"

namespace ferry::rollout::text {
namespace {

// Section 3.12 of the Unicode standard: the syllables of Hangul are composed by arithmetic.
constexpr char32_t kSyllables = 0xAC00, kLeads = 0x1100, kVowels = 0x1161, kTails = 0x11A7;
constexpr char32_t kNumLeads = 19, kNumVowels = 21, kNumTails = 28;
constexpr char32_t kNumSyllables = kNumLeads * kNumVowels * kNumTails;

using Mapping = std::unordered_map<char32_t, std::u32string>;

Mapping mapping_of(const std::vector<CharacterMapping>& entries) {
  Mapping mapping;
  for (const auto& entry : entries) mapping.emplace(entry.from, entry.to);
  return mapping;
}

struct Forms {
  Mapping canonical, compatibility;
  std::unordered_map<std::uint64_t, char32_t> compositions;  // by first << 32 | second
  std::unordered_map<char32_t, std::uint8_t> combining;
  // Characters that each NormalForm may change or join to the one before. A text can be cut
  // between any two others.
  std::array<CodePointSet, 4> restless;

  Forms() {
    std::vector<CodePointRange> marks, split{{kSyllables, kSyllables + kNumSyllables - 1}},
        seconds{{kVowels, kTails + kNumTails}}, compatible;
    for (const auto& [range, combining_class] : combining_ranges()) {
      for (auto c = range.first; c <= range.last; ++c) combining.emplace(c, combining_class);
      marks.push_back(range);
    }
    const auto decompositions = parse_mappings(unicode_data::table("Canonical"));
    canonical = mapping_of(decompositions);
    for (const auto& [c, parts, composes] : decompositions) {
      split.push_back({c, c});
      if (composes) compositions.emplace(std::uint64_t{parts[0]} << 32 | parts[1], c);
      const auto joins = composes ? parts[1] : c;
      seconds.push_back({joins, joins});
    }
    compatibility = mapping_of(parse_mappings(unicode_data::table("Compatibility")));
    for (const auto& [c, parts] : compatibility) compatible.push_back({c, c});
    const auto united = [&](std::initializer_list<const std::vector<CodePointRange>*> all) {
      auto ranges = marks;
      for (const auto* some : all) ranges.insert(ranges.end(), some->begin(), some->end());
      return CodePointSet(std::move(ranges));
    };
    restless[index(NormalForm::kNfc)] = united({&seconds});
    restless[index(NormalForm::kNfd)] = united({&split});
    restless[index(NormalForm::kNfkc)] = united({&seconds, &compatible});
    restless[index(NormalForm::kNfkd)] = united({&split, &compatible});
  }

  static std::size_t index(NormalForm form) { return static_cast<std::size_t>(form); }

  std::uint8_t combining_class(char32_t c) const {
    if (c < 0x300) return 0;
    const auto found = combining.find(c);
    return found == combining.end() ? std::uint8_t{0} : found->second;
  }
};

const Forms& forms() {
  static const Forms forms;
  return forms;
}

void decompose(char32_t c, bool compatible, std::u32string& into) {
  if (c < 0xA0) {
    into.push_back(c);
  } else if (c >= kSyllables && c < kSyllables + kNumSyllables) {
    const auto index = c - kSyllables;
    into.push_back(kLeads + index / (kNumVowels * kNumTails));
    into.push_back(kVowels + index % (kNumVowels * kNumTails) / kNumTails);
    if (index % kNumTails != 0) into.push_back(kTails + index % kNumTails);
  } else {
    if (compatible) {
      const auto found = forms().compatibility.find(c);
      if (found != forms().compatibility.end()) {
        into.append(found->second);
        return;
      }
    }
    const auto found = forms().canonical.find(c);
    if (found == forms().canonical.end()) {
      into.push_back(c);
    } else {
      for (const auto part : found->second) decompose(part, compatible, into);
    }
  }
}

// Sorts combining marks by class; marks of one class keep their order.
void order_marks(std::u32string& text) {
  for (std::size_t i = 0; i < text.size();) {
    if (forms().combining_class(text[i]) == 0) {
      ++i;
      continue;
    }
    auto end = i;
    while (end < text.size() && forms().combining_class(text[end]) != 0) ++end;
    std::stable_sort(text.begin() + static_cast<std::ptrdiff_t>(i),
                     text.begin() + static_cast<std::ptrdiff_t>(end), [](char32_t a, char32_t b) {
                       return forms().combining_class(a) < forms().combining_class(b);
                     });
    i = end;
  }
}

// Zero if the two do not compose.
char32_t composition(char32_t first, char32_t second) {
  if (first - kLeads < kNumLeads && second - kVowels < kNumVowels) {
    return kSyllables + ((first - kLeads) * kNumVowels + (second - kVowels)) * kNumTails;
  }
  if (first - kSyllables < kNumSyllables && (first - kSyllables) % kNumTails == 0 &&
      second > kTails && second < kTails + kNumTails) {
    return first + (second - kTails);
  }
  const auto found = forms().compositions.find(std::uint64_t{first} << 32 | second);
  return found == forms().compositions.end() ? 0 : found->second;
}

// Joins each character to the last starter before it, unless one between them blocks it.
void compose(std::u32string& text) {
  constexpr auto kNone = static_cast<std::size_t>(-1);
  std::size_t starter = kNone, length = 0;
  int last_class = -1;  // of the last character behind the starter; -1 if there is none
  for (const char32_t c : text) {
    const int own_class = forms().combining_class(c);
    if (starter != kNone && last_class < own_class) {
      const auto composed = composition(text[starter], c);
      if (composed != 0) {
        text[starter] = composed;
        continue;
      }
    }
    if (own_class == 0) {
      starter = length;
      last_class = -1;
    } else {
      last_class = own_class;
    }
    text[length++] = c;
  }
  text.resize(length);
}

}  // namespace

std::string normalize(std::string_view text, NormalForm form) {
  const bool composed = form == NormalForm::kNfc || form == NormalForm::kNfkc;
  const bool compatible = form == NormalForm::kNfkc || form == NormalForm::kNfkd;
  const auto& restless = forms().restless[Forms::index(form)];
  std::string normalized;
  normalized.reserve(text.size());
  std::u32string parts;
  std::size_t copied = 0, before = 0;  // `before`: beginning of the last character that stays
  for (std::size_t at = 0; at < text.size();) {
    const auto begin = at;
    if (static_cast<unsigned char>(text[at]) < 0x80) {
      ++at;
      before = begin;
      continue;
    }
    if (!restless.contains(next_code_point(text, at))) {
      before = begin;
      continue;
    }
    // Normalizes the character that stays together with the restless ones behind it.
    for (auto next = at; next < text.size() && restless.contains(next_code_point(text, next));) {
      at = next;
    }
    normalized.append(text.substr(copied, before - copied));
    parts.clear();
    while (before < at) decompose(next_code_point(text, before), compatible, parts);
    order_marks(parts);
    if (composed) compose(parts);
    for (const auto c : parts) append_utf8(c, normalized);
    copied = before = at;
  }
  return normalized.append(text.substr(copied));
}

std::string lowercase(std::string_view text) {
  static const auto lower = mapping_of(parse_mappings(unicode_data::table("Lowercase")));
  std::string written;
  written.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const auto c = next_code_point(text, at);
    const auto found = lower.find(c);
    if (found == lower.end()) {
      append_utf8(c, written);
    } else {
      for (const auto part : found->second) append_utf8(part, written);
    }
  }
  return written;
}

// The inverse of the lower case.
std::string uppercase(std::string_view text) {
  static const auto upper = [] {
    std::unordered_map<char32_t, char32_t> found;
    for (const auto& [c, lower, composes] : parse_mappings(unicode_data::table("Lowercase"))) {
      if (lower.size() == 1) found.try_emplace(lower[0], c);
    }
    found[0x131] = 'I';
    found[0x17F] = 'S';
    found[0xB5] = 0x39C;
    found[0x3C2] = 0x3A3;
    return found;
  }();
  std::string written;
  written.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const auto c = next_code_point(text, at);
    const auto found = upper.find(c);
    if (c == 0xDF) {
      written += "SS";
    } else {
      append_utf8(found == upper.end() ? c : found->second, written);
    }
  }
  return written;
}

}  // namespace ferry::rollout::text
