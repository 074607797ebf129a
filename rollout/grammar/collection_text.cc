#include "rollout/grammar/collection_text.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace ferry::rollout::grammar {
namespace {

constexpr auto kUnbounded = Expression::kUnbounded;

std::uint32_t less(std::uint32_t most, std::size_t count) {
  return most == kUnbounded ? most
                            : most - static_cast<std::uint32_t>(std::min<std::size_t>(most, count));
}

// The rest of an object behind so many listed members.
ExpressionPtr others_text(const JsonText& json,
                          const ExpressionPtr& other,
                          std::size_t num_listed,
                          CountRange count) {
  const auto needed = count.min > num_listed ? count.min - num_listed : 0;
  const auto room = less(count.max, num_listed);
  const auto end = num_listed > 0 ? json.space() : nothing();
  if (!other || room == 0) return needed == 0 ? end : never();
  if (needed > 1) return never();
  const auto more = sequence({json.comma(), other});
  if (num_listed > 0)
    return sequence({repeat(more, static_cast<std::uint32_t>(needed), room), json.space()});
  auto some = sequence({other, repeat(more, 0, less(room, 1)), json.space()});
  return needed == 0 ? choice({std::move(some), end}) : some;
}

}  // namespace

// Goes from the last item to the first.
ExpressionPtr items_text(const JsonText& json,
                         const ExpressionPtr& item,
                         const std::vector<ExpressionPtr>& first,
                         CountRange count) {
  const auto [min, max] = count;
  if (max == 0) return nothing();
  const auto fixed = std::max(static_cast<std::uint32_t>(first.size()), std::uint32_t{1});
  const auto more = sequence({json.comma(), item});
  ExpressionPtr tail = repeat(more, min > fixed ? min - fixed : 0, less(max, fixed));
  tail = sequence({std::move(tail), json.space()});
  for (auto i = fixed; i-- > 0;) {
    const auto& one = i < first.size() ? first[i] : item;
    tail =
        i > 0 ? sequence({json.comma(), one, std::move(tail)}) : sequence({one, std::move(tail)});
    if (i >= min) tail = choice({std::move(tail), i > 0 ? json.space() : nothing()});
    tail = json.rules().add(std::move(tail));  // a long list would nest deeply
  }
  return tail;
}

// Goes from the set of all values to that of none.
ExpressionPtr distinct_items_text(const JsonText& json,
                                  const std::vector<ExpressionPtr>& values,
                                  CountRange count) {
  std::vector<ExpressionPtr> tails(std::size_t{1} << values.size());  // behind each set
  for (auto set = tails.size(); set-- > 0;) {
    std::size_t size = 0;
    for (std::size_t i = 0; i < values.size(); ++i) size += set >> i & 1;
    std::vector<ExpressionPtr> ways;
    if (size >= count.min) ways.push_back(size > 0 ? json.space() : nothing());
    for (std::size_t i = 0; i < values.size() && size < count.max; ++i)
      if ((set >> i & 1) == 0)
        ways.push_back(sequence(
            {size > 0 ? json.comma() : nothing(), values[i], tails[set | std::size_t{1} << i]}));
    tails[set] = json.rules().add(choice(std::move(ways)));
  }
  return tails[0];
}

// There is a rule for each place in the list and each number of members before it. Where it counts
// no more, all larger numbers are one.
ExpressionPtr members_text(const JsonText& json,
                           const std::vector<Member>& listed,
                           const ExpressionPtr& other,
                           CountRange count) {
  const auto size = listed.size();
  const auto counted =
      std::min<std::size_t>(size, count.max == kUnbounded ? std::max(count.min, 1U) : size);
  std::vector<ExpressionPtr> tails;  // by the number of members before
  for (std::size_t before = 0; before <= counted; ++before)
    tails.push_back(json.rules().add(others_text(json, other, before, count)));
  for (auto i = size; i-- > 0;) {
    std::vector<ExpressionPtr> next;
    for (std::size_t before = 0; before <= std::min(i, counted); ++before) {
      std::vector<ExpressionPtr> ways;
      if (before < count.max)
        ways.push_back(sequence({before > 0 ? json.comma() : nothing(), listed[i].expression,
                                 tails[std::min(before + 1, counted)]}));
      if (!listed[i].is_required) ways.push_back(tails[before]);
      next.push_back(json.rules().add(choice(std::move(ways))));
    }
    tails = std::move(next);
  }
  return tails[0];
}

}  // namespace ferry::rollout::grammar
