// Rules of JSON's own grammar (RFC 8259) for texts that any reader takes: numbers fit a double,
// strings have no half of a surrogate pair, and white space between tokens has a bound.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "rollout/grammar/expression.h"

namespace ferry::rollout::grammar {

class JsonText {
 public:
  explicit JsonText(Rules& rules);

  Rules& rules() const { return rules_; }
  const ExpressionPtr& space() const { return space_; }  // at most kMostSpace characters
  const ExpressionPtr& comma() const { return comma_; }  // like the colon, with white space
  const ExpressionPtr& colon() const { return colon_; }
  const ExpressionPtr& value() const { return value_; }
  const ExpressionPtr& string() const { return string_; }
  const ExpressionPtr& integer() const { return integer_; }
  const ExpressionPtr& number() const { return number_; }
  ExpressionPtr string_of_length(std::uint32_t min, std::uint32_t max) const;
  // A string that is none of these; only a beginning that one of them has may have escapes.
  ExpressionPtr key_except(const std::vector<std::string>& names) const;
  ExpressionPtr member(ExpressionPtr key, ExpressionPtr value) const;

  static constexpr std::uint32_t kMostSpace = 24;

 private:
  Rules& rules_;
  ExpressionPtr space_, comma_, colon_, character_, string_, integer_, number_, value_;
};

}  // namespace ferry::rollout::grammar
