#include "models/spec/products.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "models/spec/parameters.h"

namespace ferry::models {
namespace {

constexpr std::string_view kWeight = "weight";

// "mlp.linear_fc1" of "mlp.linear_fc1.weight".
std::string_view module_of(std::string_view name) {
  return name.substr(0, name.rfind(kWeight) - 1);
}

// "experts.linear_fc1" of "mlp.experts.experts.linear_fc1.weight", "in_proj.query" of
// "self_attention.in_proj.weight.query".
std::string short_name(std::string_view name) {
  for (const std::string_view around :
       {"self_attention.", "core_attention.", "mlp.experts.", "mlp."})
    if (name.starts_with(around)) name.remove_prefix(around.size());
  const auto module = module_of(name);
  return fmt::format("{}{}", module, name.substr(module.size() + 1 + kWeight.size()));
}

class Collector {
 public:
  explicit Collector(const TransformerConfig& config) : config_(config) {}

  void add(const Section& section) {
    for (const auto& parameter : parameters_of(section, config_, {0, 1})) {
      const auto& row = *parameter.row;
      const bool tower = parameter.key.starts_with(kVisionModel);
      if (row.role() == Role::kProduct)
        add(section, parameter,
            row.when == When::kScore ? "score"
            : tower                  ? std::string(module_of(parameter.key))
                                     : short_name(row.name));
      if (parameter.key == kEmbeddingKey && config_.is_tied())
        tied_output_.emplace_back(section, parameter);
    }
  }

  std::vector<GemmShape> shapes() && {
    for (const auto& [section, parameter] : tied_output_) add(section, parameter, "output_layer");
    return std::move(shapes_);
  }

 private:
  void add(const Section& section, const WholeParameter& parameter, std::string name) {
    const auto n = parameter.shape[0];
    const auto k = parameter.shape[1];
    if (n == 0 || k == 0 || !seen_.insert({parameter.row, n, k}).second) return;
    // Biases of experts are added to what their product gave.
    const auto bias = fmt::format("{}.bias", module_of(parameter.row->name));
    const bool has_bias =
        !parameter.expert && std::ranges::any_of(section.table->rows, [&](const ParameterRow& row) {
          return row.name == bias && applies(row.when, config_);
        });
    shapes_.push_back({.name = std::move(name),
                       .n = n,
                       .k = k,
                       .has_bias = has_bias,
                       .cut = cut_of(parameter, Alignment::kBitwise),
                       .grouped = parameter.expert.has_value(),
                       .row = parameter.row});
  }

  const TransformerConfig& config_;
  std::vector<std::pair<Section, WholeParameter>> tied_output_;
  std::set<std::tuple<const ParameterRow*, std::int64_t, std::int64_t>> seen_;
  std::vector<GemmShape> shapes_;
};

}  // namespace

std::string GemmShape::subject() const {
  return fmt::format("{} {}x{}", name, n, k);
}

std::vector<GemmShape> gemm_shapes(const TransformerConfig& config) {
  Collector products(config);
  const auto add = [&](const std::vector<Section>& sections) {
    for (const auto& section : sections) products.add(section);
  };
  add(vision_sections(config));
  products.add({.stage = Stage::kFirst, .table = &kEmbeddingSection});
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer)
    add(layer_sections(config, layer));
  for (std::int64_t index = 0; index < config.mtp_num_layers; ++index)
    add(prediction_sections(config, index));
  products.add({.stage = Stage::kLast, .table = &kHeadSection});
  return std::move(products).shapes();
}

std::int64_t gathered_channels(const TransformerConfig& config, std::int64_t layer) {
  std::int64_t channels = 0;
  for (const auto& section : layer_sections(config, layer)) {
    for (const auto& parameter : parameters_of(section, config, /*experts=*/{})) {
      if (parameter.row->role() == Role::kProduct && parameter.split == Split::kRow)
        channels += parameter.shape[1];
    }
  }
  return channels;
}

}  // namespace ferry::models
