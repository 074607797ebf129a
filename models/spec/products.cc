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
            row.when == when::kScore ? "score"
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
          return row.name == bias && row.when(config_);
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

// The sections of the vision tower and of all stages, in the order of the modules.
std::vector<Section> all_sections(const TransformerConfig& config) {
  auto sections = vision_sections(config);
  const auto add = [&](const std::vector<Section>& more) {
    sections.insert(sections.end(), more.begin(), more.end());
  };
  add({{.stage = Stage::kFirst, .table = &kEmbeddingSection}});
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer)
    add(layer_sections(config, layer));
  for (std::int64_t index = 0; index < config.mtp_num_layers; ++index)
    add(prediction_sections(config, index));
  add({{.stage = Stage::kLast, .table = &kHeadSection}});
  return sections;
}

// True of a norm's weight that has no bias beside it, as those of LayerNorms have.
bool is_rms_norm(const ParameterRow& row, const ParameterSection& section) {
  if (row.columns != extent::kNone ||
      !(row.name.ends_with("norm.weight") || row.name.ends_with("norm_weight")))
    return false;
  const auto bias = fmt::format("{}bias", row.name.substr(0, row.name.size() - kWeight.size()));
  return std::ranges::find(section.rows, bias, &ParameterRow::name) == section.rows.end();
}

}  // namespace

std::string GemmShape::subject() const {
  return fmt::format("{} {}x{}", name, n, k);
}

std::vector<GemmShape> gemm_shapes(const TransformerConfig& config) {
  Collector products(config);
  for (const auto& section : all_sections(config)) products.add(section);
  return std::move(products).shapes();
}

std::set<std::int64_t> norm_widths(const TransformerConfig& config) {
  std::set<std::int64_t> widths;
  for (const auto& section : all_sections(config)) {
    for (const auto& parameter : parameters_of(section, config, /*experts=*/{})) {
      const auto& row = *parameter.row;
      if (!is_rms_norm(row, *section.table)) continue;
      const bool mamba = row.rows == extent::kMambaInner;
      widths.insert(parameter.shape[0] / (mamba ? config.mamba_num_groups : 1));
    }
  }
  return widths;
}

std::set<AttentionShape> attention_shapes(const TransformerConfig& config) {
  std::set<AttentionShape> shapes;
  const auto add = [&](const TransformerConfig& of) {
    const auto heads = of.num_attention_heads;
    if (of.multi_latent_attention) {
      shapes.insert({.heads = heads,
                     .groups = heads,
                     .channels = of.qk_head_dim + of.qk_pos_emb_head_dim,
                     .value_channels = of.v_head_dim});
    } else {
      shapes.insert({.heads = heads,
                     .groups = of.num_query_groups,
                     .channels = of.kv_channels,
                     .value_channels = of.kv_channels});
    }
  };
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
    const bool attends = config.is_hybrid_model()
                             ? config.hybrid_layer_pattern[static_cast<std::size_t>(layer)] == '*'
                             : !config.is_linear_attention_layer(layer);
    if (attends) add(config.of_layer(layer));
  }
  if (config.mtp_num_layers > 0 &&
      (!config.is_hybrid_model() ||
       config.mtp_hybrid_override_pattern.find('*') != std::string::npos))
    add(config);
  return shapes;
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
