// The items of an array and the members of an object, behind the bracket that opens it.
#pragma once

#include <cstdint>
#include <vector>

#include "rollout/grammar/expression.h"
#include "rollout/grammar/json_text.h"

namespace ferry::rollout::grammar {

// The number of items or members.
struct CountRange {
  std::uint32_t min = 0;
  std::uint32_t max = Expression::kUnbounded;
};

// Items behind `[`: the first ones, each as it is given, then any number of `item`.
ExpressionPtr items_text(const JsonText& json,
                         const ExpressionPtr& item,
                         const std::vector<ExpressionPtr>& first,
                         CountRange count);

// Items behind `[`: some of these values in any order, none of them twice. Their number is small:
// there is a rule for each set of them.
ExpressionPtr distinct_items_text(const JsonText& json,
                                  const std::vector<ExpressionPtr>& values,
                                  CountRange count);

struct Member {
  ExpressionPtr expression{};  // key and value
  bool is_required = false;
};

// Members behind `{`: the listed ones in their order, then any number of `other` (null: none). One
// `other` at most counts for the least number of members: a second one might have its name.
ExpressionPtr members_text(const JsonText& json,
                           const std::vector<Member>& listed,
                           const ExpressionPtr& other,
                           CountRange count);

}  // namespace ferry::rollout::grammar
