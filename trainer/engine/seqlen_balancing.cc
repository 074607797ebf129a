#include "trainer/engine/seqlen_balancing.h"

#include <algorithm>
#include <numeric>
#include <queue>
#include <utility>

#include "distckpt/base/error.h"

namespace ferry::trainer {
namespace {

struct Part {
  std::int64_t sum = 0;
  Partition items{};

  bool operator<(const Part& other) const {
    if (sum != other.sum) return sum < other.sum;
    if (items.size() != other.items.size()) return items.size() < other.items.size();
    return items < other.items;
  }
};

// A partition of some of the values, the largest part first.
struct State {
  std::vector<Part> parts{};

  std::int64_t spread() const { return parts.front().sum - parts.back().sum; }
  void sort() {
    std::ranges::stable_sort(parts, [](const Part& a, const Part& b) { return b < a; });
  }
  // The largest of one to the smallest of the other.
  void merge(const State& other) {
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const auto& from = other.parts[parts.size() - 1 - i];
      parts[i].sum += from.sum;
      parts[i].items.insert(parts[i].items.end(), from.items.begin(), from.items.end());
    }
    sort();
  }
};

// The state of the largest spread comes first, of several the one with the largest part.
struct Later {
  bool operator()(const State& a, const State& b) const {
    if (a.spread() != b.spread()) return a.spread() < b.spread();
    return a.parts.front() < b.parts.front();
  }
};

}  // namespace

std::vector<Partition> karmarkar_karp(std::span<const std::int64_t> values,
                                      std::size_t k,
                                      bool equal_size) {
  require(k > 0 && values.size() >= k, ErrorKind::kUsage,
          "{} sequences cannot be shared out over {}", values.size(), k);
  require(!equal_size || values.size() % k == 0, ErrorKind::kUsage,
          "{} sequences cannot be shared out evenly over {}", values.size(), k);
  Partition order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, {}, [&](std::size_t i) { return values[i]; });

  std::priority_queue<State, std::vector<State>, Later> states;
  const std::size_t at_once = equal_size ? k : 1;
  for (std::size_t first = 0; first < order.size(); first += at_once) {
    State state{.parts = std::vector<Part>(k)};
    for (std::size_t i = 0; i < at_once; ++i)
      state.parts[i] = {.sum = values[order[first + i]], .items = {order[first + i]}};
    state.sort();
    states.push(std::move(state));
  }
  const auto pop = [&] {
    auto state = states.top();
    states.pop();
    return state;
  };
  auto result = pop();
  while (!states.empty()) {
    result.merge(pop());
    states.push(std::move(result));
    result = pop();
  }
  std::vector<Partition> parts;
  for (auto& part : result.parts) {
    std::ranges::sort(part.items);
    parts.push_back(std::move(part.items));
  }
  return parts;
}

}  // namespace ferry::trainer
