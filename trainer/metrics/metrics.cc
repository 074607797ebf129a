#include "trainer/metrics/metrics.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <limits>

#include "distckpt/base/error.h"

namespace ferry::trainer {

void MetricAccumulator::add(std::string_view name,
                            double value,
                            Reduction reduction,
                            double weight) {
  auto& values = reduction == Reduction::kMean || reduction == Reduction::kSum ? sums_ : maxima_;
  auto found = slots_.find(name);
  if (found == slots_.end()) {
    found = slots_.emplace(name, Slot{.reduction = reduction, .index = values.size()}).first;
    const auto nothing = &values == &sums_ ? 0.0 : -std::numeric_limits<double>::infinity();
    values.insert(values.end(), reduction == Reduction::kMean ? 2 : 1, nothing);
  }
  const auto& slot = found->second;
  require(slot.reduction == reduction, ErrorKind::kBug, "{}: is reduced in two ways", name);
  auto& slot_value = values[slot.index];
  switch (reduction) {
    case Reduction::kMean:
      slot_value += value * weight;
      values[slot.index + 1] += weight;
      break;
    case Reduction::kSum:
      slot_value += value;
      break;
    case Reduction::kMin:
      slot_value = std::max(slot_value, -value);
      break;
    case Reduction::kMax:
      slot_value = std::max(slot_value, value);
      break;
  }
}

void MetricAccumulator::add_statistics(std::string_view name, std::span<const double> values) {
  for (const auto value : values) {
    add(fmt::format("{}/mean", name), value, Reduction::kMean);
    add(fmt::format("{}/max", name), value, Reduction::kMax);
    add(fmt::format("{}/min", name), value, Reduction::kMin);
  }
}

std::uint64_t MetricAccumulator::signature() const {
  std::string text;
  for (const auto& [name, slot] : slots_)
    text += fmt::format("{}:{}:{}\n", name, static_cast<int>(slot.reduction), slot.index);
  return XXH3_64bits(text.data(), text.size());
}

Metrics MetricAccumulator::result() const {
  Metrics metrics;
  for (const auto& [name, slot] : slots_) {
    switch (slot.reduction) {
      case Reduction::kMean:
        if (sums_[slot.index + 1] > 0) metrics[name] = sums_[slot.index] / sums_[slot.index + 1];
        break;
      case Reduction::kSum:
        metrics[name] = sums_[slot.index];
        break;
      case Reduction::kMin:
        metrics[name] = -maxima_[slot.index];
        break;
      case Reduction::kMax:
        metrics[name] = maxima_[slot.index];
        break;
    }
  }
  return metrics;
}

}  // namespace ferry::trainer
