// Decimal numbers between two bounds, compared digit by digit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "rollout/grammar/expression.h"

namespace ferry::rollout::grammar {

struct Decimal {
  bool is_negative = false;
  std::string whole = "0";  // without zeros in front
  std::string fraction{};   // without zeros at its end

  bool is_zero() const { return whole == "0" && fraction.empty(); }
};

// Reads JSON's spelling of a number; nothing if it has more than 20 digits before the point or
// behind it.
std::optional<Decimal> read_decimal(const std::string& text);

struct Bound {
  Decimal value{};
  bool is_exclusive = false;
};

// Whole numbers that have no remainder by a divisor. Parts of them are rules, which numbers share:
// one for each remainder and number of digits that are left.
class Multiples {
 public:
  Multiples(std::uint64_t divisor, Rules& rules) : divisor_(divisor), rules_(rules) {}

  std::uint64_t remainder(std::uint64_t before, char digit) const {
    return (before * 10 + static_cast<std::uint64_t>(digit - '0')) % divisor_;
  }
  // So many digits behind others that have this remainder.
  ExpressionPtr digits(std::size_t count, std::uint64_t remainder);

 private:
  std::uint64_t divisor_;
  Rules& rules_;
  std::map<std::pair<std::size_t, std::uint64_t>, ExpressionPtr> known_;
};

// Numbers with up to `max_fraction` digits behind the point, which are no fewer than a bound's, and
// without a bound up to `max_whole` before it. Numbers below zero have one way to be written, zero
// has no sign. `multiples`: or null; numbers of these alone, which are whole.
ExpressionPtr numbers_between(const std::optional<Bound>& least,
                              const std::optional<Bound>& most,
                              std::size_t max_whole,
                              std::size_t max_fraction,
                              Multiples* multiples = nullptr);

}  // namespace ferry::rollout::grammar
