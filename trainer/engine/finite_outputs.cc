#include "trainer/engine/finite_outputs.h"

#include <ATen/ops/isfinite.h>
#include <fmt/format.h>

#include <cstdlib>
#include <limits>

namespace ferry::trainer {
namespace {

constexpr std::string_view kLayers = "decoder.layers.";

// The embedding stands before all layers, what is none behind them.
std::int64_t layer_of(const std::string& module) {
  if (module.starts_with(kLayers)) return std::atoll(module.c_str() + kLayers.size()) + 1;
  return module == "embedding" ? 0 : std::numeric_limits<std::int32_t>::max();
}

}  // namespace

models::Observer FiniteOutputs::observer() {
  return [this](const std::string& module, const at::Tensor& output) {
    ++num_seen_;
    if (at::isfinite(output).all().item<bool>()) return;
    const auto place = fmt::format("{:012}/{:012}/{}", layer_of(module), num_seen_, module);
    if (first_.empty() || place < first_) first_ = place;
  };
}

std::string FiniteOutputs::first(const models::ProcessGroup& all) const {
  std::string first;
  for (const auto& place : all.all_gather_bytes(first_)) {
    if (!place.empty() && (first.empty() || place < first)) first = place;
  }
  return first.substr(first.rfind('/') + 1);
}

}  // namespace ferry::trainer
