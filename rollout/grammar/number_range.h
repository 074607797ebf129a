// Decimal numbers between two bounds, compared digit by digit.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "rollout/grammar/expression.h"

namespace ferry::rollout::grammar {

struct Decimal {
  bool is_negative = false;
  std::string whole = "0";  // without zeros in front
  std::string fraction{};   // without zeros at its end

  bool is_zero() const { return whole == "0" && fraction.empty(); }
};

// Reads JSON's spelling of a number; nothing if it has more than 18 digits before the point or
// behind it.
std::optional<Decimal> read_decimal(const std::string& text);

struct Bound {
  Decimal value{};
  bool is_exclusive = false;
};

// Numbers with up to `max_fraction` digits behind the point, which are no fewer than a bound's, and
// without a bound up to `max_whole` before it. Numbers below zero have one way to be written, zero
// has no sign.
ExpressionPtr numbers_between(const std::optional<Bound>& least,
                              const std::optional<Bound>& most,
                              std::size_t max_whole,
                              std::size_t max_fraction);

}  // namespace ferry::rollout::grammar
