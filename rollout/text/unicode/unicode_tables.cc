#include "rollout/text/unicode/unicode_tables.h"

#include <charconv>

namespace ferry::rollout::text {
namespace {

std::uint32_t number_in(std::string_view digits, int base) {
  std::uint32_t number = 0;
  std::from_chars(digits.data(), digits.data() + digits.size(), number, base);
  return number;
}

// Cuts off and returns what stands before `separator`, or everything.
std::string_view take_until(std::string_view& text, char separator) {
  const auto end = text.find(separator);
  const auto taken = text.substr(0, end);
  text.remove_prefix(end == text.npos ? text.size() : end + 1);
  return taken;
}

CodePointRange parse_range(std::string_view item) {
  const char32_t first = number_in(take_until(item, '-'), 16);
  return {first, item.empty() ? first : number_in(item, 16)};
}

// A line is a table, "name TAB text", or a set, "set TAB name TAB categories TAB difference".
constexpr std::string_view kTables =
#include "rollout/text/unicode/unicode_data.inc"
    ;

}  // namespace

std::string_view unicode_data::table(std::string_view name) {
  for (auto lines = kTables; !lines.empty();) {
    auto line = take_until(lines, '\n');
    if (take_until(line, '\t') == name) return line;
  }
  return {};
}

std::vector<unicode_data::NamedSet> unicode_data::sets() {
  std::vector<NamedSet> found;
  for (auto lines = kTables; !lines.empty();) {
    auto line = take_until(lines, '\n');
    if (take_until(line, '\t') != "set") continue;
    const auto name = take_until(line, '\t');
    const auto categories = take_until(line, '\t');
    found.push_back({.name = name, .categories = categories, .difference = line});
  }
  return found;
}

std::vector<NamedRanges> category_ranges() {
  std::vector<NamedRanges> categories;
  for (auto names = unicode_data::table("CategoryNames"); !names.empty();) {
    categories.push_back({.name = take_until(names, ' ')});
  }
  char32_t begin = 0;
  for (auto runs = unicode_data::table("CategoryRuns"); !runs.empty();) {
    const char letter = runs.front();
    runs.remove_prefix(1);
    const auto digits = runs.substr(0, runs.find_first_not_of("0123456789"));
    runs.remove_prefix(digits.size());
    const char32_t end = begin + (digits.empty() ? 1 : number_in(digits, 10));
    if (letter != '.') {
      const int index = letter >= 'a' ? letter - 'a' : letter - 'A' + 26;
      categories[static_cast<std::size_t>(index)].ranges.push_back({begin, end - 1});
    }
    begin = end;
  }
  return categories;
}

std::vector<CodePointRange> parse_ranges(std::string_view text) {
  std::vector<CodePointRange> ranges;
  while (!text.empty()) ranges.push_back(parse_range(take_until(text, ' ')));
  return ranges;
}

std::vector<CharacterMapping> parse_mappings(std::string_view text) {
  std::vector<CharacterMapping> mappings;
  while (!text.empty()) {
    auto to = take_until(text, ' ');
    auto from = take_until(to, '=');
    const char32_t step = from.ends_with("/2") ? 2 : 1;
    const auto range = from.empty()
                           ? CodePointRange{mappings.back().from + 1, mappings.back().from + 1}
                           : parse_range(take_until(from, '/'));
    const bool excluded = to.ends_with('!');
    std::u32string parts;
    while (!to.empty()) parts.push_back(number_in(take_until(to, '.'), 16));
    for (auto c = range.first; c <= range.last; c += step, parts[0] += step) {
      mappings.push_back({.from = c, .to = parts, .composes = parts.size() > 1 && !excluded});
    }
  }
  return mappings;
}

std::vector<CombiningRange> combining_ranges() {
  std::vector<CombiningRange> ranges;
  std::uint8_t combining_class = 0;
  for (auto text = unicode_data::table("CombiningClasses"); !text.empty();) {
    const auto item = take_until(text, ' ');
    if (item.ends_with(':')) {
      combining_class = static_cast<std::uint8_t>(number_in(item, 10));
    } else {
      ranges.push_back({.range = parse_range(item), .combining_class = combining_class});
    }
  }
  return ranges;
}

}  // namespace ferry::rollout::text
