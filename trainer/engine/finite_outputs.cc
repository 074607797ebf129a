#include "trainer/engine/finite_outputs.h"

#include <ATen/ops/isfinite.h>
#include <fmt/format.h>

#include <limits>

#include "trainer/optimizer/first_place.h"

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
    keep_first(first_, fmt::format("{:012}/{:012}/{}", layer_of(module), num_seen_, module));
  };
}

std::string FiniteOutputs::first(const models::ProcessGroup& all) const {
  return first_name(all, first_);
}

}  // namespace ferry::trainer
