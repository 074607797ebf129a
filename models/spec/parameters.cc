#include "models/spec/parameters.h"

#include <fmt/format.h>

#include <numeric>

namespace ferry::models {

namespace {

// Layers that look at a window alone are stacked, and so are those that look at all tokens.
std::vector<Section> two_kinds_of_layers(const TransformerConfig& config,
                                         std::int64_t layer,
                                         const Section& section) {
  std::vector<Section> sections(3, section);
  auto& attention = sections[0];
  const bool sliding = config.window_of(layer).has_value();
  attention.table = sliding ? &kSlidingAttentionSection : &kGlobalAttentionSection;
  attention.stack_size = attention.stack_index = 0;
  for (std::int64_t other = 0; other < config.num_layers; ++other) {
    if (config.window_of(other).has_value() != sliding) continue;
    ++attention.stack_size;
    if (other < layer) ++attention.stack_index;
  }
  sections[1].table = &kScaledLayerSection;
  sections[2].table = &mlp_section(config.is_moe_layer(layer));
  return sections;
}

}  // namespace

std::vector<std::int64_t> merged_rows(const ParameterRow& row, const TransformerConfig& config) {
  const auto rows = row.rows(config);
  switch (row.merge) {
    case Merge::kCopy:
      return {rows};
    case Merge::kQkvGroups:
      return {(config.attention_output_gate ? 2 : 1) * extent::kHeads(config), rows, rows};
    case Merge::kGateUp:
      if (!config.gated_linear_unit) return {rows};
      return {rows, rows};
  }
  return {};
}

std::optional<TransformerConfig> layer_sizes(const Section& section,
                                             const TransformerConfig& config) {
  const bool alike = !config.has_global_attention() && !config.shares_indexers();
  if (section.stage != Stage::kLayer || alike) return std::nullopt;
  return config.of_layer(*section.layer);
}

std::vector<Section> layer_sections(const TransformerConfig& config, std::int64_t layer) {
  const Section section{
      .stage = Stage::kLayer,
      .layer = layer,
      .prefix = fmt::format("{}{}.", kDecoderLayers, layer),
      .stacked = std::string(kDecoderLayers),
      .stack_size = config.num_layers,
      .stack_index = layer,
      .table = config.is_hybrid_model()
                   ? &hybrid_section(config,
                                     config.hybrid_layer_pattern[static_cast<std::size_t>(layer)])
                   : &attention_section(config, config.is_linear_attention_layer(layer))};
  if (config.is_hybrid_model()) return {section};
  if (config.has_global_attention()) return two_kinds_of_layers(config, layer, section);
  std::vector<Section> sections{section, section};
  sections[1].table = &mlp_section(config.is_moe_layer(layer));
  return sections;
}

std::vector<Section> prediction_sections(const TransformerConfig& config, std::int64_t index) {
  const Section own{.stage = Stage::kMtp,
                    .layer = index,
                    .prefix = fmt::format("{}{}.", kPredictionLayers, index),
                    .table = &kPredictionSection};
  if (config.is_hybrid_model()) {
    std::vector<Section> sections{own};
    for (std::size_t i = 0; i < config.mtp_hybrid_override_pattern.size(); ++i) {
      sections.push_back(own);
      sections.back().prefix += fmt::format("mtp_model_layer.layers.{}.", i);
      sections.back().table = &hybrid_section(config, config.mtp_hybrid_override_pattern[i]);
    }
    sections.push_back(own);
    sections.back().table = &kPredictionNormSection;
    return sections;
  }
  std::vector<Section> sections(4, own);
  sections[1].table = &attention_section(config, false);
  sections[2].table = &mlp_section(config.num_moe_experts > 0);
  sections[3].table = &kPredictionNormSection;
  for (const auto wrapped : {1, 2})
    sections[static_cast<std::size_t>(wrapped)].prefix += "transformer_layer.";
  return sections;
}

std::vector<Section> vision_sections(const TransformerConfig& config) {
  if (!config.vision) return {};
  std::vector<Section> sections;
  const auto add = [&](std::string prefix, const ParameterSection& table) {
    sections.push_back({.stage = Stage::kFirst, .prefix = std::move(prefix), .table = &table});
  };
  add(std::string(kVisionModel), kVisionEmbeddingSection);
  for (std::int64_t i = 0; i < config.vision->depth; ++i)
    add(fmt::format("{}{}{}.", kVisionModel, kDecoderLayers, i), kVisionBlockSection);
  add(fmt::format("{}merger.", kVisionModel), kVisionMergerSection);
  for (std::size_t i = 0; i < config.vision->deepstack_visual_indexes.size(); ++i)
    add(fmt::format("{}decoder.deepstack_merger_list.{}.", kVisionModel, i),
        kVisionDeepstackSection);
  return sections;
}

WholeParameter make_parameter(const Section& section,
                              const ParameterRow& row,
                              const TransformerConfig& model,
                              std::optional<std::int64_t> expert) {
  const auto sizes = layer_sizes(section, model);
  const auto& config = sizes ? *sizes : model;
  WholeParameter parameter{
      .row = &row,
      .key = fmt::format("{}{}", section.prefix, row.name),
      .stack_size = section.stack_size,
      .stack_index = section.stack_index,
      .layer = section.layer,
      .expert = expert,
      .merge = row.merge == Merge::kGateUp && !config.gated_linear_unit ? Merge::kCopy : row.merge,
      .split = row.split,
      .stage = section.stage,
      .vocabulary = row.rows == extent::kVocab,
      .fp32 = row.fp32,
      .less_one = row.less_one,
      // A weight less one loses bits of the weight in bf16.
      .trained_in_fp32 = row.less_one || row.trained_in_fp32};
  const auto rows = merged_rows(row, config);
  parameter.shape.push_back(std::accumulate(rows.begin(), rows.end(), std::int64_t{0}));
  for (const auto size : {row.columns, row.depth, row.height, row.width}) {
    if (size != extent::kNone) parameter.shape.push_back(size(config));
  }
  const auto in_stack = [&](std::string_view name) {
    return fmt::format("{}{}", section.stacked, name);
  };
  if (!section.stacked.empty()) parameter.stacked_key = in_stack(row.name);
  for (const auto& other : section.table->other_names) {
    if (other.name != row.name) continue;
    parameter.also.push_back(fmt::format("{}{}", section.prefix, other.other));
    if (!section.stacked.empty()) parameter.also.push_back(in_stack(other.other));
  }
  return parameter;
}

std::vector<WholeParameter> parameters_of(const Section& section,
                                          const TransformerConfig& model,
                                          ExpertRange experts) {
  const auto sizes = layer_sizes(section, model);
  const auto& config = sizes ? *sizes : model;
  std::vector<WholeParameter> parameters;
  const auto rows = section.table->rows;
  for (std::size_t i = 0; i < rows.size();) {
    if (!rows[i].per_expert) {
      if (rows[i].when(config))
        parameters.push_back(make_parameter(section, rows[i], model, std::nullopt));
      ++i;
      continue;
    }
    auto end = i;
    while (end < rows.size() && rows[end].per_expert) ++end;
    for (auto expert = experts.begin; expert < experts.end; ++expert) {
      for (auto one = i; one < end; ++one) {
        if (rows[one].when(config))
          parameters.push_back(make_parameter(section, rows[one], model, expert));
      }
    }
    i = end;
  }
  return parameters;
}

std::string with_expert(std::string_view key, std::int64_t expert) {
  constexpr std::string_view kExperts = "experts.experts.";
  const auto at = key.rfind(kExperts) + kExperts.size();
  return fmt::format("{}{}.{}", key.substr(0, at), expert, key.substr(at));
}

std::string single_key(const WholeParameter& parameter) {
  return parameter.expert ? with_expert(parameter.key, *parameter.expert) : parameter.key;
}

std::string_view strip_wrappers(std::string_view key) {
  constexpr std::string_view kWrapper = "module.";
  while (key.starts_with(kWrapper)) key.remove_prefix(kWrapper.size());
  return key;
}

}  // namespace ferry::models
