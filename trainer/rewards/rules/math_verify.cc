#include "trainer/rewards/rules/math_verify.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "distckpt/base/trimmed.h"
#include "trainer/rewards/rules/math_answer.h"
#include "trainer/rewards/rules/math_expression.h"

namespace ferry::trainer::math_verify {
namespace {

constexpr std::size_t kLongest = 1000;  // characters of an answer
constexpr int kPoints = 3;
constexpr auto kNone = std::string_view::npos;

bool is_letter(char c) {
  return std::isalpha(static_cast<unsigned char>(c)) != 0;
}
bool is_a_digit(char c) {
  return std::isdigit(static_cast<unsigned char>(c)) != 0;
}

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (auto at = text.find(from); at != kNone; at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
}

// Commands that wrap text, such as units and words: only their content stays.
void unwrap(std::string& text) {
  for (const std::string_view name :
       {"\\text{", "\\textbf{", "\\textit{", "\\mathrm{", "\\mathbf{", "\\mbox{", "\\boxed{"}) {
    for (auto at = text.find(name); at != kNone; at = text.find(name, at)) {
      const auto inner = in_braces(text, at + name.size() - 1);
      if (!inner) break;
      const std::string content(*inner);
      text.replace(at, name.size() + content.size() + 1, content);
    }
  }
}

// Units and words behind a number: "3 cm", "5 square inches".
void drop_units(std::string& text) {
  constexpr auto kUnits = std::to_array<std::string_view>(
      {"square", "cubic",  "units",   "unit",   "cm",      "mm",    "km",   "m",
       "kg",     "g",      "inches",  "inch",   "feet",    "foot",  "ft",   "miles",
       "meters", "metres", "dollars", "cents",  "degrees", "hours", "hour", "minutes",
       "days",   "weeks",  "years",   "points", "people",  "mph",   "per"});
  while (true) {
    const auto end = trimmed(text).size();
    text = std::string(trimmed(text));
    auto word = end;
    if (word > 2 && text[word - 2] == '^' && is_a_digit(text[word - 1])) word -= 2;  // cm^2
    const auto last = word;
    while (word > 0 && is_letter(text[word - 1])) --word;
    const auto name = std::string_view(text).substr(word, last - word);
    const auto before = trimmed(std::string_view(text).substr(0, word));
    const bool is_unit = std::ranges::find(kUnits, name) != kUnits.end();
    const bool is_apart = word > 0 && (text[word - 1] == ' ' || name.size() > 1);
    if (!is_unit || !is_apart || before.empty()) return;
    if (!is_a_digit(before.back()) && before.back() != '}' && !is_letter(before.back())) return;
    text = std::string(before);
  }
}

// 1,234,000 -> 1234000
void join_thousands(std::string& text) {
  const auto digits_at = [&](std::size_t at) {
    std::size_t count = 0;
    while (at + count < text.size() && is_a_digit(text[at + count])) ++count;
    return count;
  };
  for (std::size_t i = 0; i < text.size(); ++i) {
    auto end = i + digits_at(i);
    if (end > i && end - i <= 3 && text[i] != '0') {
      while (end < text.size() && text[end] == ',' && digits_at(end + 1) == 3) {
        text.erase(end, 1);
        end += 3;
      }
    }
    i = end;
  }
}

// 3\pm x -> 3+x,3-x
void write_out_signs(std::string& text) {
  constexpr std::string_view kBoth = "\\pm";
  const auto at = text.find(kBoth);
  if (at == kNone || text.find(kBoth, at + 1) != kNone || text.find(',') != kNone) return;
  const auto left = text.substr(0, at), right = text.substr(at + kBoth.size());
  text = left + "+" + right + "," + left + "-" + right;
}

struct Answer {
  std::string text{};
  bool is_percent = false;
};

Answer normalized(std::string_view original) {
  std::string text(trimmed(original));
  constexpr auto kReplacements = std::to_array<std::pair<std::string_view, std::string_view>>({
      {"\\\\ ", "\\\\"},
      {"\\left\\{", "\\{"},
      {"\\right\\}", "\\}"},
      {"\\left", ""},
      {"\\right", ""},
      {"\\dfrac", "\\frac"},
      {"\\tfrac", "\\frac"},
      {"\\cfrac", "\\frac"},
      {"\\$", ""},
      {"$", ""},
      {"\\!", ""},
      {"\\,", " "},
      {"\\;", " "},
      {"\\:", " "},
      {"\\ ", " "},
      {"~", " "},
      {"\\quad", " "},
      {"\\displaystyle", ""},
      {"^{\\circ}", ""},
      {"^\\circ", ""},
      {"\\degree", ""},
      {"{,}", ","},
      {"\\%", "%"},
      {"\\leq", "\\le"},
      {"\\geq", "\\ge"},
      {"\\varnothing", "\\emptyset"},
      {"\\{\\}", "\\emptyset"},
      {"\\lbrace", "\\{"},
      {"\\rbrace", "\\}"},
      {"\\lbrack", "["},
      {"\\rbrack", "]"},
      {"−", "-"},
      {"\\operatorname", ""},
      {"\\infinity", "\\infty"},
      {"\\in[", "\\in ["},
      {"\\in(", "\\in ("},
      {"\\in\\{", "\\in \\{"},
  });
  for (const auto& [from, to] : kReplacements) replace_all(text, from, to);
  unwrap(text);
  Answer answer{.text = std::move(text)};
  while (answer.text.ends_with('.') || answer.text.ends_with(' ') || answer.text.ends_with('%')) {
    answer.is_percent = answer.is_percent || answer.text.back() == '%';
    answer.text.pop_back();
  }
  drop_units(answer.text);
  write_out_signs(answer.text);
  join_thousands(answer.text);
  answer.text = std::string(trimmed(answer.text));
  return answer;
}

// Splits where brackets of all kinds are closed. `by` has one character, or is a command.
std::vector<std::string_view> split_outside(std::string_view text, std::string_view by) {
  std::vector<std::string_view> parts;
  int depth = 0;
  std::size_t begin = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (depth == 0 && text.substr(i).starts_with(by)) {
      parts.push_back(trimmed(text.substr(begin, i - begin)));
      i += by.size() - 1;
      begin = i + 1;
      continue;
    }
    const auto c = text[i];
    depth += c == '(' || c == '[' || c == '{' ? 1 : c == ')' || c == ']' || c == '}' ? -1 : 0;
    if (c == '\\' && depth >= 0 && i + 1 < text.size() && !is_letter(text[i + 1]) &&
        text[i + 1] != '{' && text[i + 1] != '}')
      ++i;
  }
  parts.push_back(trimmed(text.substr(begin)));
  return parts;
}

bool is_equal(std::string_view a, std::string_view b, int depth);

bool are_equal(const std::vector<std::string_view>& a,
               const std::vector<std::string_view>& b,
               int depth) {
  return std::ranges::equal(a, b, [&](auto x, auto y) { return is_equal(x, y, depth); });
}

// Each element of one is in the other.
bool are_same_set(const std::vector<std::string_view>& a,
                  const std::vector<std::string_view>& b,
                  int depth) {
  const auto has = [&](const auto& in, auto x) {
    return std::ranges::any_of(in, [&](auto y) { return is_equal(x, y, depth); });
  };
  return std::ranges::all_of(a, [&](auto x) { return has(b, x); }) &&
         std::ranges::all_of(b, [&](auto x) { return has(a, x); });
}

std::string without_spaces(std::string_view text) {
  std::string result;
  for (const char c : text)
    if (c != ' ' && c != '\n' && c != '\t') result += c;
  return result;
}

char in_lower_case(char c) {
  return static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
}

// Letters that are no product of variables.
bool is_word(std::string_view text) {
  return text.size() > 3 &&
         std::ranges::all_of(text, [](char c) { return is_letter(c) || c == ' '; });
}

// A decimal number without what does not count: "+03.10" -> "3.1"; empty if it is none.
std::string plain_number(std::string_view text) {
  std::string sign;
  if (text.starts_with('+') || text.starts_with('-')) {
    if (text[0] == '-') sign = "-";
    text.remove_prefix(1);
  }
  const auto point = text.find('.');
  std::string whole(text.substr(0, point));
  std::string part(point == kNone ? "" : text.substr(point + 1));
  if (whole.empty() && part.empty()) return "";
  if (!std::ranges::all_of(whole + part, is_a_digit)) return "";
  whole.erase(0, std::min(whole.size(), whole.find_first_not_of('0')));
  part.erase(part.find_last_not_of('0') + 1);
  if (whole.empty() && part.empty()) return "0";
  return sign + (whole.empty() ? "0" : whole) + (part.empty() ? "" : "." + part);
}

bool have_same_values(std::string_view a, std::string_view b) {
  for (int point = 0; point < kPoints; ++point) {
    const auto x = math_value(a, point), y = math_value(b, point);
    if (!x || !y || std::abs(*x - *y) > 1e-11 * std::max(std::abs(*x), std::abs(*y))) return false;
  }
  return true;
}

std::optional<std::string_view> inside(std::string_view text,
                                       std::string_view open,
                                       std::string_view close) {
  if (text.size() < open.size() + close.size() || !text.starts_with(open) || !text.ends_with(close))
    return std::nullopt;
  return text.substr(open.size(), text.size() - open.size() - close.size());
}

std::optional<std::vector<std::string_view>> elements_of_set(std::string_view text) {
  if (text == "\\emptyset") return std::vector<std::string_view>();
  const auto content = inside(text, "\\{", "\\}");
  return content ? std::optional(split_outside(*content, ",")) : std::nullopt;
}

struct Matrix {
  char fence = '(';  // vmatrix is a determinant
  std::vector<std::string_view> rows{};
};

std::optional<Matrix> matrix_of(std::string_view text) {
  for (const std::string_view kind : {"pmatrix", "bmatrix", "matrix", "vmatrix"}) {
    const auto content =
        inside(text, "\\begin{" + std::string(kind) + "}", "\\end{" + std::string(kind) + "}");
    if (!content) continue;
    Matrix matrix{.fence = kind[0] == 'v' ? '|' : '('};
    for (auto row : split_outside(*content, "\\\\"))
      if (!row.empty()) matrix.rows.push_back(row);
    return matrix;
  }
  return std::nullopt;
}

bool is_bracketed(std::string_view text) {
  return text.size() > 2 && (text[0] == '(' || text[0] == '[') &&
         (text.back() == ')' || text.back() == ']');
}

// x = 5 is 5, but not y = 5.
std::optional<bool> compare_equations(std::string_view a, std::string_view b, int depth) {
  const auto left = split_outside(a, "="), right = split_outside(b, "=");
  if (left.size() > 2 || right.size() > 2 || left.size() + right.size() == 2) return std::nullopt;
  if (left.size() == right.size())
    return (is_equal(left[0], right[0], depth) && is_equal(left[1], right[1], depth)) ||
           (is_equal(left[0], right[1], depth) && is_equal(left[1], right[0], depth));
  const auto& equation = left.size() == 2 ? left : right;
  const bool names = !equation[0].empty() && is_letter(equation[0][0]) && equation[0].size() <= 4;
  return names && is_equal(equation[1], left.size() == 2 ? right[0] : left[0], depth);
}

struct Relation {
  std::string_view name{};  // the less one is on the left
  std::string_view left{};
  std::string_view right{};
};

std::optional<Relation> relation_of(std::string_view text) {
  for (const std::string_view name : {"<", ">", "\\le", "\\ge", "\\neq", "\\ne"}) {
    const auto sides = split_outside(text, name);
    if (sides.size() != 2) continue;
    if (name == ">") return Relation{"<", sides[1], sides[0]};
    if (name == "\\ge") return Relation{"\\le", sides[1], sides[0]};
    return Relation{name, sides[0], sides[1]};
  }
  return std::nullopt;
}

// 3 > x is x < 3, and x \in [1,2] is [1,2].
std::optional<bool> compare_relations(std::string_view a, std::string_view b, int depth) {
  const auto members = split_outside(a, "\\in "), others = split_outside(b, "\\in ");
  if (members.size() == 2 || others.size() == 2)
    return is_equal(members.back(), others.back(), depth);
  const auto one = relation_of(a), two = relation_of(b);
  if (!one && !two) return std::nullopt;
  return one && two && one->name == two->name && is_equal(one->left, two->left, depth) &&
         is_equal(one->right, two->right, depth);
}

// Nothing if neither has such a structure.
std::optional<bool> compare_structures(std::string_view a, std::string_view b, int depth) {
  const auto parts = split_outside(a, "\\cup"), others = split_outside(b, "\\cup");
  if (parts.size() > 1 || others.size() > 1)
    return parts.size() == others.size() && are_same_set(parts, others, depth);
  const auto set = elements_of_set(a), other_set = elements_of_set(b);
  if (set || other_set) {  // a list may stand for a set
    const auto one = set ? *set : split_outside(a, ","),
               two = other_set ? *other_set : split_outside(b, ",");
    const bool are_elements = (set || one.size() > 1) && (other_set || two.size() > 1);
    return are_elements && are_same_set(one, two, depth);
  }
  const auto matrix = matrix_of(a), other_matrix = matrix_of(b);
  if (matrix || other_matrix) {
    if (!matrix || !other_matrix || matrix->fence != other_matrix->fence) return false;
    return std::ranges::equal(matrix->rows, other_matrix->rows, [&](auto x, auto y) {
      return are_equal(split_outside(x, "&"), split_outside(y, "&"), depth);
    });
  }
  if (is_bracketed(a) && is_bracketed(b)) {
    const auto one = split_outside(a.substr(1, a.size() - 2), ",");
    const auto two = split_outside(b.substr(1, b.size() - 2), ",");
    if (one.size() > 1 || two.size() > 1)
      return a[0] == b[0] && a.back() == b.back() && are_equal(one, two, depth);
  }
  const auto list = split_outside(a, ","), other_list = split_outside(b, ",");
  if (list.size() > 1 || other_list.size() > 1)
    return list.size() == other_list.size() && are_same_set(list, other_list, depth);
  if (const auto same = compare_relations(a, b, depth)) return same;
  return compare_equations(a, b, depth);
}

// (A) is A.
std::string_view without_choice(std::string_view text) {
  return text.size() == 3 && text[0] == '(' && text[2] == ')' && is_letter(text[1])
             ? text.substr(1, 1)
             : text;
}

bool is_equal(std::string_view a, std::string_view b, int depth) {
  constexpr int kDeepest = 6;
  if (depth > kDeepest) return false;
  a = without_choice(trimmed(a));
  b = without_choice(trimmed(b));
  if (without_spaces(a) == without_spaces(b)) return !a.empty();
  if (is_word(a) && is_word(b)) return std::ranges::equal(a, b, {}, in_lower_case, in_lower_case);
  if (a.empty() || b.empty() || is_word(a) || is_word(b)) return false;
  if (const auto same = compare_structures(a, b, depth + 1)) return *same;
  const auto x = plain_number(a), y = plain_number(b);
  if (!x.empty() && !y.empty()) return x == y;
  return have_same_values(a, b);
}

// A percentage is the number, or its hundredth.
bool is_same(const Answer& a, const Answer& b) {
  if (is_equal(a.text, b.text, 0)) return true;
  if (a.is_percent == b.is_percent) return false;
  const auto& percent = a.is_percent ? a.text : b.text;
  return is_equal("(" + percent + ")/100", a.is_percent ? b.text : a.text, 0);
}

}  // namespace

double compute_score(std::string_view solution_str, std::string_view ground_truth) {
  const auto found = answer_of(solution_str);
  if (!found || found->size() > kLongest || ground_truth.size() > kLongest) return 0;
  const auto truth = boxed(ground_truth).value_or(std::string(ground_truth));
  return is_same(normalized(*found), normalized(truth)) ? 1 : 0;
}

}  // namespace ferry::trainer::math_verify
