#include "rollout/text/unicode/unicode.h"

#include <algorithm>
#include <cstring>
#include <map>

namespace ferry::rollout::text {

void append_utf8(char32_t c, std::string& text) {
  const auto push = [&](char32_t byte) { text.push_back(static_cast<char>(byte)); };
  if (c < 0x80) {
    push(c);
  } else if (c < 0x800) {
    push(0xC0 | c >> 6);
    push(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    push(0xE0 | c >> 12);
    push(0x80 | (c >> 6 & 0x3F));
    push(0x80 | (c & 0x3F));
  } else {
    push(0xF0 | c >> 18);
    push(0x80 | (c >> 12 & 0x3F));
    push(0x80 | (c >> 6 & 0x3F));
    push(0x80 | (c & 0x3F));
  }
}

std::u32string to_code_points(std::string_view text) {
  std::u32string found;
  found.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) found.push_back(next_code_point(text, at));
  return found;
}

// Table 3-7 of the Unicode standard, well-formed byte sequences.
Utf8Head utf8_head(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) return {.length = 1, .valid = true};
  if (first < 0xC2 || first > 0xF4) return {.length = 1};
  const std::size_t length = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  unsigned low = 0x80, high = 0xBF;  // of the second byte
  if (first == 0xE0) low = 0xA0;
  if (first == 0xED) high = 0x9F;
  if (first == 0xF0) low = 0x90;
  if (first == 0xF4) high = 0x8F;
  for (std::size_t i = 1; i < length; ++i, low = 0x80, high = 0xBF) {
    if (i == text.size()) return {.length = i, .complete = false};
    if (byte(i) < low || byte(i) > high) return {.length = i};
  }
  return {.length = length, .valid = true};
}

namespace {

// Bytes of ASCII at the front, in steps of eight.
std::size_t ascii_prefix(std::string_view text) {
  std::size_t at = 0;
  for (; at + 8 <= text.size(); at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, text.data() + at, 8);
    if ((word & 0x8080808080808080) != 0) break;
  }
  return at;
}

std::size_t valid_prefix(std::string_view text) {
  std::size_t at = 0;
  while (true) {
    at += ascii_prefix(text.substr(at));
    if (at == text.size()) return at;
    const auto head = utf8_head(text.substr(at));
    if (!head.valid) return at;
    at += head.length;
  }
}

}  // namespace

bool is_valid_utf8(std::string_view text) {
  return valid_prefix(text) == text.size();
}

std::string replace_invalid_utf8(std::string_view text) {
  std::string replaced;
  replaced.reserve(text.size());
  while (!text.empty()) {
    const auto valid = valid_prefix(text);
    replaced.append(text.substr(0, valid));
    text.remove_prefix(valid);
    if (text.empty()) break;
    append_utf8(kReplacementCharacter, replaced);
    text.remove_prefix(utf8_head(text).length);
  }
  return replaced;
}

CodePointSet::CodePointSet(std::vector<CodePointRange> ranges) {
  std::ranges::sort(ranges, {}, &CodePointRange::first);
  for (const auto& range : ranges) {
    if (!ranges_.empty() && range.first <= ranges_.back().last + 1) {
      ranges_.back().last = std::max(ranges_.back().last, range.last);
    } else {
      ranges_.push_back(range);
    }
  }
  if (ranges_.empty()) return;
  page_of_.resize((ranges_.back().last >> 8) + 1);
  pages_.emplace_back();
  std::map<Page, std::uint16_t> known;
  Page bits{};
  std::size_t page = 0;  // of the bits
  const auto finish_page = [&] {
    if (bits == Page{}) return;
    if (page > 0 && pages_[page_of_[page - 1]] == bits) {
      page_of_[page] = page_of_[page - 1];
    } else {
      const auto [found, is_new] =
          known.try_emplace(bits, static_cast<std::uint16_t>(pages_.size()));
      if (is_new) pages_.push_back(bits);
      page_of_[page] = found->second;
    }
    bits = {};
  };
  for (const auto& [first, last] : ranges_) {
    for (std::size_t word = first >> 6; word <= last >> 6; ++word) {
      if (word >> 2 != page) finish_page();
      page = word >> 2;
      auto mask = ~std::uint64_t{0};
      if (word == first >> 6) mask <<= first & 63;
      if (word == last >> 6) mask &= ~std::uint64_t{0} >> (63 - (last & 63));
      bits[word & 3] |= mask;
    }
  }
  finish_page();
}

CodePointSet CodePointSet::inverted() const {
  std::vector<CodePointRange> others;
  char32_t begin = 0;
  for (const auto& range : ranges_) {
    if (range.first > begin) others.push_back({begin, range.first - 1});
    begin = range.last + 1;
  }
  if (begin <= kLastCodePoint) others.push_back({begin, kLastCodePoint});
  return CodePointSet(std::move(others));
}

CodePointSet CodePointSet::united(const CodePointSet& other) const {
  auto ranges = ranges_;
  ranges.insert(ranges.end(), other.ranges_.begin(), other.ranges_.end());
  return CodePointSet(std::move(ranges));
}

CodePointSet CodePointSet::intersected(const CodePointSet& other) const {
  std::vector<CodePointRange> both;
  for (auto a = ranges_.begin(), b = other.ranges_.begin();
       a != ranges_.end() && b != other.ranges_.end();) {
    const auto first = std::max(a->first, b->first), last = std::min(a->last, b->last);
    if (first <= last) both.push_back({first, last});
    if (a->last < b->last)
      ++a;
    else
      ++b;
  }
  return CodePointSet(std::move(both));
}

const CodePointSet* CodePointSet::named(std::string_view name) {
  static const auto sets = [] {
    std::map<std::string, CodePointSet, std::less<>> found;
    std::map<std::string, std::vector<CodePointRange>, std::less<>> groups;  // "L": Lu, Ll ...
    for (auto& category : category_ranges()) {
      auto& group = groups[std::string(category.name.substr(0, 1))];
      group.insert(group.end(), category.ranges.begin(), category.ranges.end());
      found.emplace(category.name, CodePointSet(std::move(category.ranges)));
    }
    for (auto& [group, ranges] : groups) found.emplace(group, CodePointSet(std::move(ranges)));
    for (const auto& set : unicode_data::sets()) {
      // A character is in the set where an odd number of these ranges have begun and not ended.
      std::vector<char32_t> edges;
      const auto add = [&](const std::vector<CodePointRange>& some) {
        for (const auto& range : some) edges.insert(edges.end(), {range.first, range.last + 1});
      };
      for (std::size_t at = 0; at < set.categories.size(); at += 3) {
        add(found.find(set.categories.substr(at, 2))->second.ranges());
      }
      add(parse_ranges(set.difference));
      std::ranges::sort(edges);
      std::vector<CodePointRange> ranges;
      for (std::size_t i = 0; i < edges.size(); i += 2) {
        if (edges[i] < edges[i + 1]) ranges.push_back({edges[i], edges[i + 1] - 1});
      }
      found.emplace(set.name, CodePointSet(std::move(ranges)));
    }
    return found;
  }();
  const auto found = sets.find(name);
  return found == sets.end() ? nullptr : &found->second;
}

std::size_t white_space_prefix(std::string_view text) {
  const auto& white_space = *CodePointSet::named("WhiteSpace");
  std::size_t end = 0;
  for (auto at = end; at < text.size() && white_space.contains(next_code_point(text, at));) {
    end = at;
  }
  return end;
}

std::size_t white_space_suffix(std::string_view text) {
  const auto& white_space = *CodePointSet::named("WhiteSpace");
  auto begin = text.size();
  while (begin > 0) {
    const auto last = previous_boundary(text, begin);
    auto at = last;
    if (!white_space.contains(next_code_point(text, at))) break;
    begin = last;
  }
  return text.size() - begin;
}

}  // namespace ferry::rollout::text
