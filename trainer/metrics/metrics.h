// The numbers of a step under verl's names, and how those of several ranks become one: a mean, a
// sum, a minimum or a maximum. What ranks must exchange is two flat arrays; who exchanges them is
// not here.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ferry::trainer {

using Metrics = std::map<std::string, double, std::less<>>;

enum class Reduction : std::uint8_t { kMean, kSum, kMin, kMax };

class MetricAccumulator {
 public:
  // A mean weighs its values: a loss by its tokens. Throws Error(kBug) if the name has been reduced
  // otherwise before.
  void add(std::string_view name, double value, Reduction reduction, double weight = 1);

  // verl's three numbers of a quantity: name/mean, name/max, name/min.
  void add_statistics(std::string_view name, std::span<const double> values);

  // The same on ranks whose arrays fit together: a digest of names and reductions, in order.
  std::uint64_t signature() const;

  // Ranks replace these by their sum and by their maximum over all ranks, element by element,
  // before any of them takes the result.
  std::span<double> to_sum() { return sums_; }
  std::span<double> to_max() { return maxima_; }

  // A mean over no weight is left out.
  Metrics result() const;

 private:
  struct Slot {
    Reduction reduction = Reduction::kMean;
    std::size_t index = 0;  // in sums_ or maxima_
  };

  std::map<std::string, Slot, std::less<>> slots_;
  std::vector<double> sums_;    // a mean has two: sum of value x weight, sum of weight
  std::vector<double> maxima_;  // a minimum is the maximum of its negative
};

}  // namespace ferry::trainer
