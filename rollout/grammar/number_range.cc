#include "rollout/grammar/number_range.h"

#include <algorithm>
#include <charconv>
#include <utility>

namespace ferry::rollout::grammar {
namespace {

constexpr std::size_t kMostDigits = 20;  // of a uint64

ExpressionPtr digits(std::size_t min, std::size_t max) {
  return repeat(bytes('0', '9'), static_cast<std::uint32_t>(min), static_cast<std::uint32_t>(max));
}

// Numbers from zero on. "Held" to a bound: all digits so far are the bound's.
class MagnitudeWriter {
 public:
  MagnitudeWriter(const Bound& least,
                  const std::optional<Bound>& most,
                  std::size_t max_fraction,
                  Multiples* multiples)
      : least_(least),
        most_(most),
        max_fraction_(multiples == nullptr ? max_fraction : 0),
        multiples_(multiples) {}

  ExpressionPtr write(std::size_t max_whole) {
    const auto from = least_.value.whole.size();
    const auto to = most_ ? most_->value.whole.size() : std::max(max_whole, from);
    std::vector<ExpressionPtr> ways;
    for (length_ = from; length_ <= to; ++length_)
      ways.push_back(whole(0, length_ == from, most_ && length_ == to, 0));
    return choice(std::move(ways));
  }

 private:
  // Calls rest(its first digit, held to least, held to most) for the ranges of a digit.
  template <typename Rest>
  ExpressionPtr digit(char low, char high, bool least, bool most, Rest&& rest) const {
    std::vector<ExpressionPtr> ways;
    const auto add_range = [&](char first, char last, bool is_least, bool is_most) {
      ways.push_back(
          sequence({bytes(static_cast<std::uint8_t>(first), static_cast<std::uint8_t>(last)),
                    rest(first, is_least, is_most)}));
    };
    const auto add = [&](char first, char last, bool is_least, bool is_most) {
      if (multiples_ == nullptr && first <= last) add_range(first, last, is_least, is_most);
      for (auto one = first; multiples_ != nullptr && one <= last; ++one)
        add_range(one, one, is_least, is_most);
    };
    if (least && most && low == high) {
      add(low, high, true, true);
    } else if (low <= high) {
      if (least) add(low, low, true, false);
      if (most) add(high, high, false, true);
      add(static_cast<char>(low + (least ? 1 : 0)), static_cast<char>(high - (most ? 1 : 0)), false,
          false);
    }
    return choice(std::move(ways));
  }

  // `remainder`: of the digits before, by the divisor of multiples.
  ExpressionPtr whole(std::size_t at, bool least, bool most, std::uint64_t remainder) const {
    if (at == length_) return remainder == 0 ? fraction(least, most) : never();
    const bool is_first = at == 0 && length_ > 1;
    if (!least && !most && !is_first && multiples_ != nullptr)
      return multiples_->digits(length_ - at, remainder);
    if (!least && !most && !is_first)
      return sequence({digits(length_ - at, length_ - at), fraction(false, false)});
    const char low = least ? least_.value.whole[at] : is_first ? '1' : '0';
    const char high = most ? most_->value.whole[at] : '9';
    return digit(low, high, least, most, [&](char one, bool is_least, bool is_most) {
      const auto next = multiples_ == nullptr ? 0 : multiples_->remainder(remainder, one);
      return whole(at + 1, is_least, is_most, next);
    });
  }

  ExpressionPtr fraction(bool least, bool most) const {
    std::vector<ExpressionPtr> ways;
    if (may_end(0, least, most)) ways.push_back(nothing());
    if (max_fraction_ > 0) ways.push_back(sequence({literal("."), behind_point(0, least, most)}));
    return choice(std::move(ways));
  }

  ExpressionPtr behind_point(std::size_t at, bool least, bool most) const {
    if (at == max_fraction_) return never();
    if (!least && !most) return digits(1, max_fraction_ - at);
    const auto of = [&](const Decimal& value) {
      return at < value.fraction.size() ? value.fraction[at] : '0';
    };
    return digit(least ? of(least_.value) : '0', most ? of(most_->value) : '9', least, most,
                 [&](char, bool is_least, bool is_most) {
                   std::vector<ExpressionPtr> ways{behind_point(at + 1, is_least, is_most)};
                   if (may_end(at + 1, is_least, is_most)) ways.push_back(nothing());
                   return choice(std::move(ways));
                 });
  }

  // After so many digits behind the point.
  bool may_end(std::size_t at, bool least, bool most) const {
    if (least && (at < least_.value.fraction.size() || least_.is_exclusive)) return false;
    return !most || at < most_->value.fraction.size() || !most_->is_exclusive;
  }

  Bound least_;
  std::optional<Bound> most_;
  std::size_t max_fraction_;
  Multiples* multiples_;
  std::size_t length_ = 0;
};

}  // namespace

ExpressionPtr Multiples::digits(std::size_t count, std::uint64_t remainder) {
  if (count == 0) return remainder == 0 ? nothing() : never();
  auto& known = known_[{count, remainder}];
  if (known) return known;
  std::vector<ExpressionPtr> ways;
  for (char one = '0'; one <= '9'; ++one)
    ways.push_back(sequence({bytes(static_cast<std::uint8_t>(one), static_cast<std::uint8_t>(one)),
                             digits(count - 1, this->remainder(remainder, one))}));
  return known = rules_.add(choice(std::move(ways)));
}

std::optional<Decimal> read_decimal(const std::string& text) {
  Decimal decimal{.is_negative = text.starts_with('-')};
  const auto e = std::min(text.find_first_of("eE"), text.size());
  const auto begin = decimal.is_negative ? std::size_t{1} : 0;
  auto all = text.substr(begin, e - begin);
  const auto point = std::min(all.find('.'), all.size());
  int exponent = 0;
  if (e < text.size()) {
    const auto* from = text.data() + e + 1;
    if (*from == '+') ++from;
    std::from_chars(from, text.data() + text.size(), exponent);
  }
  if (point < all.size()) all.erase(point, 1);
  auto place = static_cast<int>(point) + exponent;  // of the point
  if (std::abs(place) > 400) return std::nullopt;
  if (place < 1) all.insert(0, static_cast<std::size_t>(1 - place), '0'), place = 1;
  if (place > static_cast<int>(all.size())) all.resize(static_cast<std::size_t>(place), '0');
  decimal.whole = all.substr(0, static_cast<std::size_t>(place));
  decimal.whole.erase(0, std::min(decimal.whole.find_first_not_of('0'), decimal.whole.size() - 1));
  decimal.fraction = all.substr(static_cast<std::size_t>(place));
  decimal.fraction.resize(decimal.fraction.find_last_not_of('0') + 1);
  if (decimal.is_zero()) decimal.is_negative = false;
  if (decimal.whole.size() > kMostDigits || decimal.fraction.size() > kMostDigits)
    return std::nullopt;
  return decimal;
}

ExpressionPtr numbers_between(const std::optional<Bound>& least,
                              const std::optional<Bound>& most,
                              std::size_t max_whole,
                              std::size_t max_fraction,
                              Multiples* multiples) {
  std::vector<ExpressionPtr> ways;
  if (!most || !most->value.is_negative) {  // from zero on
    const bool is_least = least && (!least->value.is_negative || least->value.is_zero());
    ways.push_back(MagnitudeWriter(is_least ? *least : Bound{}, most, max_fraction, multiples)
                       .write(max_whole));
  }
  if (!least || (least->value.is_negative && !least->value.is_zero())) {
    const bool is_least = most && most->value.is_negative;
    const Bound zero{.is_exclusive = true};
    ways.push_back(sequence(
        {literal("-"), MagnitudeWriter(is_least ? *most : zero, least, max_fraction, multiples)
                           .write(max_whole)}));
  }
  return choice(std::move(ways));
}

}  // namespace ferry::rollout::grammar
