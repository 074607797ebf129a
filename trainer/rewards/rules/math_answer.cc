#include "trainer/rewards/rules/math_answer.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstddef>
#include <utility>

#include "distckpt/base/trimmed.h"
#include "trainer/rewards/rules/math_expression.h"

namespace ferry::trainer::math_verify {
namespace {

constexpr auto kNowhere = std::string_view::npos;
constexpr std::size_t kLongestFormula = 1000;  // characters of a formula, a calculation and a list
constexpr std::size_t kNear = 50;              // characters between "answer" and what it announces
constexpr std::size_t kNearSign = 100;         // and its sign of equality

struct Found {
  std::string content{};
  std::size_t begin = 0;
  std::size_t end = 0;
};

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}
bool is_space(char c) {
  return std::string_view(" \t\r\n\v\f").find(c) != kNowhere;
}

// The character at a place; a space at both ends.
char at(std::string_view text, std::size_t i) {
  return i < text.size() ? text[i] : ' ';
}
std::size_t behind_spaces(std::string_view text, std::size_t i) {
  while (i < text.size() && is_space(text[i])) ++i;
  return i;
}
std::size_t behind_digits(std::string_view text, std::size_t i) {
  while (i < text.size() && is_digit(text[i])) ++i;
  return i;
}

// The place behind a sign of a percentage, if there is one.
std::size_t behind_percent(std::string_view text, std::size_t i) {
  const auto sign = text.substr(std::min(text.size(), behind_spaces(text, i)));
  for (const std::string_view name :
       {"\\%", "%", "percentage", "Percentage", "percent", "Percent", "pct", "Pct"})
    if (sign.starts_with(name)) return text.size() - sign.size() + name.size();
  return i;
}

struct Fence {
  std::string_view open{};
  std::string_view close{};
  bool in_one_line = true;
};
constexpr auto kFences =
    std::to_array<Fence>({{"$$", "$$", false}, {"\\[", "\\]", false}, {"$", "$"}, {"\\(", "\\)"}});

std::optional<Found> fenced_at(std::string_view text, std::size_t begin, const Fence& fence) {
  const auto before = begin == 0 ? ' ' : text[begin - 1];
  if (!text.substr(begin).starts_with(fence.open) || before == '\\' ||
      (fence.open == "$" && is_digit(before)))  // 5$ is a price
    return std::nullopt;
  text = text.substr(0, begin + kLongestFormula);
  const auto first = begin + fence.open.size();
  auto end = text.find(fence.close, first + 1);
  while (end != kNowhere && text[end - 1] == '\\') end = text.find(fence.close, end + 1);
  if (end == kNowhere) return std::nullopt;
  const auto content = text.substr(first, end - first);
  if (fence.in_one_line && content.find('\n') != kNowhere) return std::nullopt;
  if (fence.open == "$" && content.starts_with('$')) return std::nullopt;
  return Found{std::string(content), begin, end + fence.close.size()};
}

// " [x = 5] ", as display mathematics without its backslashes.
std::optional<Found> bracketed_at(std::string_view text, std::size_t begin) {
  if (!is_space(text[begin]) || at(text, begin + 1) != '[') return std::nullopt;
  const auto first = begin + 2, end = text.find_first_of("[]\n", first);
  if (end == kNowhere || text[end] != ']' || end == first || end + 1 >= text.size() ||
      !is_space(text[end + 1]))
    return std::nullopt;
  return Found{std::string(text.substr(first, end - first)), begin, end + 2};
}

std::size_t behind_number(std::string_view text, std::size_t begin) {
  const auto first = begin + (at(text, begin) == '-' ? 1 : 0);
  const auto end = behind_digits(text, first);
  if (end == first) return begin;
  const bool has_part =
      (at(text, end) == '.' || at(text, end) == ',') && is_digit(at(text, end + 1));
  return has_part ? behind_digits(text, end + 1) : end;
}

std::optional<Found> fraction_at(std::string_view text, std::size_t begin) {
  constexpr std::string_view kName = "\\frac";
  auto end = begin + (text[begin] == '-' ? 1 : 0);
  if (!text.substr(end).starts_with(kName)) return std::nullopt;
  end += kName.size();
  for (int part = 0; part < 2; ++part) {
    const auto number = behind_number(text, end + 1);
    if (at(text, end) != '{' || number == end + 1 || at(text, number) != '}') return std::nullopt;
    end = number + 1;
  }
  return Found{std::string(text.substr(begin, end - begin)), begin, end};
}

std::optional<Found> formula_at(std::string_view text, std::size_t begin) {
  std::optional<Found> found;
  for (const auto& fence : kFences)
    if (!found) found = fenced_at(text, begin, fence);
  if (!found) found = bracketed_at(text, begin);
  if (!found) found = fraction_at(text, begin);
  if (!found) return std::nullopt;
  const auto end = behind_percent(text, found->end);
  if (end != found->end) found->content += "\\%";
  found->end = end;
  return found;
}

// The place behind "and", "or" or a comma; nothing if the list ends.
std::optional<std::size_t> behind_separator(std::string_view text, std::size_t i) {
  const auto rest = text.substr(std::min(text.size(), behind_spaces(text, i)));
  for (const std::string_view name : {",and", ",or", "and", "or", ","})
    if (rest.starts_with(name)) return behind_spaces(text, text.size() - rest.size() + name.size());
  return std::nullopt;
}

std::optional<Found> formulas_at(std::string_view text, std::size_t begin) {
  constexpr int kMost = 6;
  auto all = formula_at(text, begin);
  for (int count = 1; all && count < kMost; ++count) {
    const auto next = behind_separator(text, all->end);
    if (!next || *next >= text.size()) break;
    const auto more = formula_at(text, *next);
    if (!more) break;
    all->content += "," + more->content;
    all->end = more->end;
  }
  return all;
}

// 1/2, 3*(4-1): as long as can be, from a digit, with at least one operator.
std::optional<Found> calculation_at(std::string_view text, std::size_t begin) {
  constexpr std::string_view kOperators = "+-*/^()";
  const auto is_part = [&](char c) {
    return is_digit(c) || c == '.' || is_space(c) || kOperators.find(c) != kNowhere;
  };
  auto first = begin + (at(text, begin) == '-' ? 1 : 0);
  if (at(text, first) == '(') first += at(text, first + 1) == '-' ? 2 : 1;
  if (!is_digit(at(text, first))) return std::nullopt;
  const auto bound = std::min(text.size(), begin + kLongestFormula);
  auto end = first + 1;
  while (end < bound && is_part(text[end])) ++end;
  const auto ends_here = [&] {
    const auto behind = at(text, end + (text.substr(end).starts_with("**") ? 2 : 0));
    return is_space(behind) || std::string_view(".,:)$").find(behind) != kNowhere;
  };
  const auto sign = std::min(end, text.substr(0, end).find_first_of(kOperators, first + 1));
  while (end > sign + 1 && !ends_here()) --end;
  if (end <= sign + 1) return std::nullopt;
  std::string content(trimmed(text.substr(begin, end - begin)));
  if (!math_value(content, 0)) return std::nullopt;
  return Found{std::move(content), begin, end};
}

// 1,234.5 and 1 234.5, 0,5, .5, 007.
std::optional<Found> plain_number_at(std::string_view text, std::size_t begin) {
  std::string content(at(text, begin) == '-' ? "-" : "");
  auto end = begin + content.size();
  if (at(text, end) == '.' && content.empty()) {
    end = behind_digits(text, begin + 1);
    if (end == begin + 1) return std::nullopt;
    content = "0" + std::string(text.substr(begin, end - begin));
  } else {
    const auto first = end;
    end = behind_digits(text, first);
    if (end == first) return std::nullopt;
    content += text.substr(first, end - first);
    const auto is_group = [&](std::size_t i) {
      return (at(text, i) == ',' || at(text, i) == ' ') && is_digit(at(text, i + 1)) &&
             is_digit(at(text, i + 2)) && is_digit(at(text, i + 3)) && !is_digit(at(text, i + 4));
    };
    const bool has_groups = text[first] != '0' && end - first <= 3 && is_group(end);
    for (; has_groups && is_group(end); end += 4) content += text.substr(end + 1, 3);
    const bool has_part = (at(text, end) == '.' || (at(text, end) == ',' && !has_groups)) &&
                          is_digit(at(text, end + 1));
    if (has_part) {
      const auto last = behind_digits(text, end + 1);
      content += "." + std::string(text.substr(end + 1, last - end - 1));
      end = last;
    }
  }
  const auto behind = behind_percent(text, end);
  if (behind != end) content += "%";
  return Found{std::move(content), begin, behind};
}

// A calculation or number without fences, at the beginning, behind a space or behind `=`.
std::optional<Found> number_at(std::string_view text, std::size_t begin) {
  if (begin > 0 && !is_space(text[begin - 1]) && text[begin - 1] != '=') return std::nullopt;
  constexpr std::string_view kBold = "**";
  if (text.substr(begin).starts_with(kBold)) begin += kBold.size();
  if (auto found = calculation_at(text, begin)) return found;
  for (const std::string_view currency : {"$", "€", "£", "¥", "₹", "₩", "₽"})
    if (text.substr(begin).starts_with(currency))
      return plain_number_at(text, begin + currency.size());
  return plain_number_at(text, begin);
}

// The one that ends last, and of those the longer one.
std::optional<Found> later(std::optional<Found> a, std::optional<Found> b) {
  if (!a || !b) return a ? std::move(a) : std::move(b);
  const bool is_first = a->end != b->end ? a->end > b->end : a->begin <= b->begin;
  return is_first ? std::move(a) : std::move(b);
}

std::optional<Found> last_of(std::string_view text) {
  std::optional<Found> formula, number;
  for (std::size_t i = 0; i < text.size();) {
    auto found = formulas_at(text, i);
    i = found ? found->end : i + 1;
    if (found) formula = std::move(found);
  }
  for (std::size_t i = 0; i < text.size();) {
    auto found = number_at(text, i);
    i = found ? found->end : i + 1;
    if (found) number = std::move(found);
  }
  return later(std::move(formula), std::move(number));
}

// The first within kNear characters; a number behind the last `=` of kNearSign goes before others.
std::optional<Found> first_of(std::string_view text) {
  const auto is_equated = [&](const Found& found) {
    return at(text, behind_spaces(text, found.end)) == '=';
  };
  std::optional<Found> formula, number;
  for (std::size_t i = 0; i < text.size() && i <= kNear && !formula; ++i)
    formula = formulas_at(text, i);
  if (const auto sign = text.substr(0, kNearSign).rfind('='); sign != kNowhere)
    number = number_at(text, behind_spaces(text, sign + 1));
  for (std::size_t i = 0; i < text.size() && i <= kNear && !number; ++i) {
    number = number_at(text, i);
    if (number && is_equated(*number)) number.reset();
  }
  return later(std::move(formula), std::move(number));
}

// Numbers, operators, commands and single letters: no words but names of units.
bool is_formula(std::string_view line) {
  for (std::size_t i = 0; i < line.size(); ++i) {
    if (line[i] == '\\') {
      const bool has_text = line.substr(i).starts_with("\\text");
      while (i + 1 < line.size() && std::isalpha(static_cast<unsigned char>(line[i + 1]))) ++i;
      if (has_text) return true;
    } else if (std::isalpha(static_cast<unsigned char>(line[i])) &&
               std::isalpha(static_cast<unsigned char>(at(line, i + 1)))) {
      return false;
    }
  }
  return !line.empty();
}

// "is: **x = 5**." -> "x = 5"
std::string_view announced(std::string_view line) {
  constexpr std::string_view kMarks = "*: \t\r";
  line = line.substr(std::min(line.size(), line.find_first_not_of(kMarks)));
  if (line.starts_with("is") &&
      (line.size() == 2 || !std::isalpha(static_cast<unsigned char>(line[2]))))
    line.remove_prefix(2);
  line = line.substr(std::min(line.size(), line.find_first_not_of(kMarks)));
  line = line.substr(0, line.find_last_not_of("* \t\r.") + 1);
  return line;
}

// In what stands behind a mark.
std::optional<std::string> announced_in(std::string_view text) {
  auto line = announced(text.substr(0, text.find('\n')));
  if (auto found = line.empty() ? std::nullopt : formulas_at(line, 0);
      found && found->end == line.size())
    return std::move(found->content);
  const auto equation = line.rfind('=');  // of numbers: 3 + 4 = 7
  if (equation != kNowhere && !std::isalpha(static_cast<unsigned char>(line[0])) && line[0] != '\\')
    line = trimmed(line.substr(equation + 1));
  if (is_formula(line)) return std::string(line);
  if (auto found = first_of(text)) return std::move(found->content);
  const auto words = std::ranges::count(line, ' ') + 1;
  constexpr int kMostWords = 3;
  if (line.empty() || words > kMostWords) return std::nullopt;
  return std::string(line);
}

// Between two boxes of one list: "$ and $".
bool is_separator(std::string_view text) {
  std::string words;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto pair = text.substr(i, 2);
    if (pair == "\\(" || pair == "\\)")
      ++i;
    else if (text[i] != '$' && !is_space(text[i]))
      words += text[i];
  }
  return words == "," || words == "and" || words == "or" || words == ",and" || words == ",or";
}

struct Box {
  std::size_t begin = 0;
  std::string_view content{};
  std::size_t end = 0;
};

// The last that begins in front of `end`.
std::optional<Box> last_box(std::string_view text, std::size_t end) {
  std::optional<Box> last;
  for (const std::string_view name : {"\\boxed{", "\\fbox{"}) {
    const auto begin = text.substr(0, end).rfind(name);
    if (begin == kNowhere || (last && begin < last->begin)) continue;
    const auto content = in_braces(text, begin + name.size() - 1);
    last = content ? std::optional(Box{begin, *content, begin + name.size() + content->size() + 1})
                   : std::nullopt;
  }
  return last;
}

// The formula or number behind "final answer is".
std::optional<Found> final_answer(std::string_view text, std::string_view in_lower_case) {
  constexpr std::string_view kMark = "final answer is";
  const auto mark = in_lower_case.rfind(kMark);
  if (mark == kNowhere) return std::nullopt;
  auto begin = mark + kMark.size();
  if (at(text, begin) == ':') ++begin;
  begin = behind_spaces(text, begin);
  if (begin >= text.size()) return std::nullopt;
  return later(formulas_at(text, begin), number_at(text, begin));
}

// The answer behind the last of the marks that has one.
std::optional<std::string> behind_mark(std::string_view text,
                                       std::string_view in_lower_case,
                                       std::string_view mark) {
  for (auto i = in_lower_case.rfind(mark); i != kNowhere; i = in_lower_case.rfind(mark, i - 1)) {
    if (auto found = announced_in(text.substr(i + mark.size()))) return found;
    if (i == 0) break;
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string_view> in_braces(std::string_view text, std::size_t open) {
  int depth = 0;
  for (auto i = open; i < text.size(); ++i) {
    if (text[i] == '\\') {
      ++i;
      continue;
    }
    depth += text[i] == '{' ? 1 : text[i] == '}' ? -1 : 0;
    if (depth == 0) return text.substr(open + 1, i - open - 1);
  }
  return std::nullopt;
}

std::optional<std::string> boxed(std::string_view text) {
  const auto last = last_box(text, kNowhere);
  if (!last) return std::nullopt;
  std::string all(last->content);
  for (auto first = *last;;) {
    const auto before = last_box(text, first.begin);
    if (!before || before->end > first.begin || all.size() > kLongestFormula ||
        !is_separator(text.substr(before->end, first.begin - before->end)))
      return all;
    all.insert(0, std::string(before->content) + ",");
    first = *before;
  }
}

std::optional<std::string> answer_of(std::string_view text) {
  std::string in_lower_case(text);
  std::ranges::transform(in_lower_case, in_lower_case.begin(), [](unsigned char c) {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : static_cast<char>(c);
  });
  const auto box = last_box(text, kNowhere);
  if (auto found = final_answer(text, in_lower_case); found && (!box || box->begin < found->begin))
    return std::move(found->content);
  if (box) return boxed(text);
  for (const std::string_view mark : {"answer:", "answer"})
    if (auto found = behind_mark(text, in_lower_case, mark)) return found;
  auto found = last_of(text);
  return found ? std::optional(std::move(found->content)) : std::nullopt;
}

}  // namespace ferry::trainer::math_verify
