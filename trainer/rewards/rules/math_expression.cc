#include "trainer/rewards/rules/math_expression.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string>
#include <utility>

namespace ferry::trainer {
namespace {

constexpr int kDeepest = 100;

struct NoExpression {};

using Function = MathValue (*)(MathValue);
constexpr std::array<std::pair<std::string_view, Function>, 16> kFunctions{{
    {"sin", [](MathValue x) { return std::sin(x); }},
    {"cos", [](MathValue x) { return std::cos(x); }},
    {"tan", [](MathValue x) { return std::tan(x); }},
    {"cot", [](MathValue x) { return MathValue(1) / std::tan(x); }},
    {"sec", [](MathValue x) { return MathValue(1) / std::cos(x); }},
    {"csc", [](MathValue x) { return MathValue(1) / std::sin(x); }},
    {"arcsin", [](MathValue x) { return std::asin(x); }},
    {"arccos", [](MathValue x) { return std::acos(x); }},
    {"arctan", [](MathValue x) { return std::atan(x); }},
    {"sinh", [](MathValue x) { return std::sinh(x); }},
    {"cosh", [](MathValue x) { return std::cosh(x); }},
    {"tanh", [](MathValue x) { return std::tanh(x); }},
    {"ln", [](MathValue x) { return std::log(x); }},
    {"exp", [](MathValue x) { return std::exp(x); }},
    {"log", [](MathValue x) { return std::log(x); }},  // math_verify's base is e, too
    {"sqrt", [](MathValue x) { return std::sqrt(x); }},
}};

// sum := product (('+' | '-') product)*, product := power (('*' | '/' | nothing) power)*,
// power := atom ('^' atom | '!')*
class Parser {
 public:
  Parser(std::string_view text, int point) : rest_(text), point_(point) {}

  MathValue whole() {
    const auto value = sum();
    skip();
    if (!rest_.empty()) throw NoExpression();
    return value;
  }

 private:
  void skip() {
    while (!rest_.empty() && std::isspace(static_cast<unsigned char>(rest_[0])) != 0)
      rest_.remove_prefix(1);
  }
  bool take(std::string_view token) {
    skip();
    if (!rest_.starts_with(token)) return false;
    // The name of a command ends where its letters do.
    const bool is_name = token.size() > 1 && token[0] == '\\';
    if (is_name && rest_.size() > token.size() &&
        std::isalpha(static_cast<unsigned char>(rest_[token.size()])) != 0)
      return false;
    rest_.remove_prefix(token.size());
    return true;
  }
  void expect(std::string_view token) {
    if (!take(token)) throw NoExpression();
  }

  MathValue sum() {
    if (++depth_ > kDeepest) throw NoExpression();
    MathValue value = take("-") ? -product() : (take("+"), product());
    while (true) {
      if (take("+"))
        value += product();
      else if (take("-"))
        value -= product();
      else
        break;
    }
    --depth_;
    return value;
  }

  MathValue product() {
    auto value = power();
    while (true) {
      if (take("\\cdot") || take("\\times") || take("*"))
        value *= signed_power();
      else if (take("/") || take("\\div"))
        value /= signed_power();
      else if (begins_atom())
        value *= power();
      else
        return value;
    }
  }

  MathValue signed_power() { return take("-") ? -power() : power(); }

  bool begins_atom() {
    skip();
    if (rest_.empty()) return false;
    const auto c = rest_[0];
    if (std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '(' || c == '{' || c == '[')
      return true;
    return c == '\\' && rest_.size() > 1 && std::isalpha(static_cast<unsigned char>(rest_[1])) != 0;
  }

  MathValue power() {
    if (++depth_ > kDeepest) throw NoExpression();
    auto value = atom();
    while (true) {
      if (take("^") || take("**")) {
        const bool is_negative = take("-");
        const auto exponent = begins_number() ? number() : argument();  // x^10 is x^{10}
        value = std::pow(value, is_negative ? -exponent : exponent);
      } else if (take("!")) {
        if (value.imag() != 0) throw NoExpression();
        value = std::tgamma(value.real() + 1);
      } else {
        break;
      }
    }
    --depth_;
    return value;
  }

  bool begins_number() {
    skip();
    return !rest_.empty() &&
           (std::isdigit(static_cast<unsigned char>(rest_[0])) != 0 || rest_[0] == '.');
  }

  // A group in braces, or a single character as of \frac12.
  MathValue argument() {
    if (take("{")) {
      const auto value = sum();
      expect("}");
      return value;
    }
    if (begins_number() && rest_[0] != '.') {
      const double digit = rest_[0] - '0';
      rest_.remove_prefix(1);
      return digit;
    }
    return atom();
  }

  MathValue fraction() {
    const auto above = argument();
    return above / argument();
  }

  MathValue binomial() {
    const auto n = argument(), k = argument();
    if (n.imag() != 0 || k.imag() != 0) throw NoExpression();
    return std::tgamma(n.real() + 1) / std::tgamma(k.real() + 1) /
           std::tgamma(n.real() - k.real() + 1);
  }

  MathValue number() {
    std::size_t size = 0;
    while (size < rest_.size() &&
           (std::isdigit(static_cast<unsigned char>(rest_[size])) != 0 || rest_[size] == '.'))
      ++size;
    double value = 0;
    const auto* const end = rest_.data() + size;
    const auto read = std::from_chars(rest_.data(), end, value, std::chars_format::fixed);
    if (read.ec != std::errc() || read.ptr != end) throw NoExpression();
    const bool is_whole = rest_.substr(0, size).find('.') == std::string_view::npos;
    rest_.remove_prefix(size);
    // 1\frac{1}{2} is 3/2.
    const auto before = rest_;
    if (is_whole && take("\\frac")) {
      const auto part = fraction();
      if (part.imag() == 0 && part.real() > 0 && part.real() < 1) return value + part;
      rest_ = before;
    }
    return value;
  }

  MathValue root() {
    MathValue degree = 2;
    if (take("[")) {
      degree = sum();
      expect("]");
    }
    const auto value = argument();
    return degree == MathValue(2) ? std::sqrt(value) : std::pow(value, MathValue(1) / degree);
  }

  MathValue applied(std::string_view name, Function function) {
    MathValue base = std::numbers::e, exponent = 1;
    if (name == "log" && take("_")) base = argument();
    if (take("^")) exponent = argument();
    const auto value = function(begins_group() ? atom() : operand());
    return std::pow(name == "log" ? value / std::log(base) : value, exponent);
  }
  // \sin 2x\cos x is a product of two functions.
  MathValue operand() {
    auto value = power();
    while (begins_atom() && !begins_function()) value *= power();
    return value;
  }
  bool begins_function() {
    skip();
    const auto name = rest_.substr(rest_.starts_with('\\') ? 1 : 0);
    return std::ranges::any_of(kFunctions,
                               [&](const auto& one) { return name.starts_with(one.first); });
  }
  bool begins_group() {
    skip();
    return !rest_.empty() && (rest_[0] == '(' || rest_[0] == '{' || rest_[0] == '[');
  }

  MathValue grouped(std::string_view close) {
    const auto value = sum();
    expect(close);
    return value;
  }

  MathValue atom() {
    skip();
    if (rest_.empty()) throw NoExpression();
    if (begins_number()) return number();
    if (take("(")) return grouped(")");
    if (take("[")) return grouped("]");
    if (take("{")) return grouped("}");
    if (take("|")) return std::abs(grouped("|"));
    if (take("\\frac")) return fraction();
    if (take("\\binom")) return binomial();
    if (take("\\sqrt")) return root();
    if (take("\\pi")) return std::numbers::pi;
    for (const auto& [name, function] : kFunctions) {
      const auto before = rest_;
      take("\\");
      if (rest_.starts_with(name) &&
          (rest_.size() == name.size() ||
           std::isalpha(static_cast<unsigned char>(rest_[name.size()])) == 0)) {
        rest_.remove_prefix(name.size());
        return applied(name, function);
      }
      rest_ = before;
    }
    return variable();
  }

  // A letter, or a Greek one by its command, with what stands below it.
  MathValue variable() {
    std::size_t size = rest_[0] == '\\' ? 1 : 0;
    while (size < rest_.size() && std::isalpha(static_cast<unsigned char>(rest_[size])) != 0) {
      ++size;
      if (rest_[0] != '\\') break;
    }
    if (size == 0 || rest_.substr(0, size) == "\\") throw NoExpression();
    std::string name(rest_.substr(0, size));
    rest_.remove_prefix(size);
    if (name == "e") return std::numbers::e;
    if (name == "i") return {0, 1};
    if (take("_")) {
      skip();
      const auto end = rest_.starts_with('{') ? rest_.find('}') : 0;
      if (rest_.empty() || end == std::string_view::npos) throw NoExpression();
      name += '_';
      for (const char c : rest_.substr(0, end + 1))
        if (c != '{' && c != '}' && c != ' ') name += c;
      rest_.remove_prefix(end + 1);
    }
    std::uint64_t hash = 0xcbf29ce484222325 + static_cast<std::uint64_t>(point_);  // FNV-1a
    for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    hash ^= hash >> 29;
    const auto value = 1.1 + static_cast<double>(hash % 1'000'003) / 1'000'003;
    return point_ % 2 == 0 ? value : -value;  // \sqrt{x^2} is not x
  }

  std::string_view rest_;
  int point_;
  int depth_ = 0;
};

}  // namespace

std::optional<MathValue> math_value(std::string_view latex, int point) {
  try {
    const auto value = Parser(latex, point).whole();
    if (std::isfinite(value.real()) && std::isfinite(value.imag())) return value;
  } catch (const NoExpression&) {  // NOLINT(bugprone-empty-catch): said by the result
  }
  return std::nullopt;
}

}  // namespace ferry::trainer
