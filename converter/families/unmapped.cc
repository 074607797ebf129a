#include "converter/families/unmapped.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

namespace ferry::converter {
namespace {

using models::ParameterSection;
using models::TransformerConfig;
using models::When;
namespace when = models::when;

// Takes the number that `text` begins with.
std::optional<std::int64_t> number_at(std::string_view& text) {
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number < 0) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return number;
}

// True if `name` is spelled as a rule's pattern says; `expert` is then what {e} stands for.
bool spells(std::string_view pattern, std::string_view name, std::int64_t& expert) {
  const auto open = pattern.find('{');
  if (open == std::string_view::npos) return pattern == name;
  if (!name.starts_with(pattern.substr(0, open))) return false;
  name.remove_prefix(open);
  const auto close = pattern.find('}', open);
  auto choices = pattern.substr(open + 1, close - open - 1);
  const auto rest = pattern.substr(close + 1);
  if (choices == "e") {
    const auto number = number_at(name);
    expert = number.value_or(0);
    return number && spells(rest, name, expert);
  }
  while (true) {
    const auto choice = choices.substr(0, choices.find(','));
    if (name.starts_with(choice) && spells(rest, name.substr(choice.size()), expert)) return true;
    if (choice.size() == choices.size()) return false;
    choices.remove_prefix(choice.size() + 1);
  }
}

struct Match {
  const ParameterSection* section = nullptr;
  const HfName* name = nullptr;
  std::int64_t expert = 0;
};

std::optional<Match> find_name(const ParameterSection& section,
                               std::span<const HfName> names,
                               std::string_view hf) {
  Match match{.section = &section};
  for (const auto& name : names) {
    match.name = &name;
    if (spells(name.hf, hf, match.expert)) return match;
  }
  return std::nullopt;
}

// The setting that takes the rows with this condition away.
std::string why_not(const Match& match, const TransformerConfig& config) {
  static constexpr std::pair<When, std::string_view> kReasons[] = {
      {when::kPerLayerInputs, "layers have no inputs of their own (hidden_size_per_layer_input)"},
      {when::kLatentExperts, "experts are as wide as the layers (moe_latent_size)"},
      {when::kQkvBias, "there are no such biases (attention_bias, mlp_bias, qkv_bias)"},
      {when::kLinearBias, "there are no such biases (attention_bias, mlp_bias, qkv_bias)"},
      {when::kUntied, "the model ends in another head (architectures)"},
      {when::kScore, "the model ends in another head (architectures)"},
      {when::kScoreBias, "the model ends in another head (architectures)"},
      {when::kShared, "there are no shared experts (n_shared_experts)"},
      {when::kExpertBias, "routers have no bias (topk_method)"},
      {when::kQLora, "queries are projected at once (q_lora_rank is null)"},
      {when::kQLoraNorm, "queries are projected at once (q_lora_rank is null)"},
      {when::kNoQLora, "queries take a low-rank path (q_lora_rank is {})"},
  };
  const auto* const row = row_of(*match.section, *match.name);
  if (row == nullptr) return {};
  for (const auto& [when, reason] : kReasons)
    if (when == row->when)
      return "config.json says that " + fmt::format(fmt::runtime(reason), config.q_lora_rank);
  return {};
}

std::string why_not_in_layer(const ModelMap& map, std::int64_t layer, std::string_view name) {
  const auto& config = map.config;
  const auto& names = *map.family->names;
  const auto num_layers = config.num_layers + config.mtp_num_layers;
  if (layer >= num_layers) {
    const auto prediction = names.prediction.empty()
                                ? ""
                                : fmt::format(" and {} of prediction ({})", config.mtp_num_layers,
                                              map.family->prediction.keys.front());
    return fmt::format("config.json says that there are {} layers (num_hidden_layers){}",
                       config.num_layers, prediction);
  }
  const bool moe =
      layer < config.num_layers ? config.is_moe_layer(layer) : config.num_moe_experts > 0;
  const auto find_mlp = [&](bool of_moe) {
    return find_name(models::mlp_section(of_moe), of_moe ? names.moe_mlp : names.dense_mlp, name);
  };
  if (find_mlp(!moe) && !find_mlp(moe))
    return fmt::format("config.json says that layer {} has {}experts", layer, moe ? "" : "no ");
  const auto find_attention = [&](bool linear) {
    return find_name(models::attention_section(config, linear),
                     linear ? names.linear_attention : names.attention, name);
  };
  const bool linear = layer < config.num_layers && config.is_linear_attention_layer(layer);
  if (find_attention(!linear) && !find_attention(linear))
    return fmt::format("config.json says that layer {} has {} attention (layer_types)", layer,
                       linear ? "linear" : "full");
  for (const auto& match : {find_attention(linear), find_mlp(moe)}) {
    if (!match) continue;
    if (match->expert >= config.num_moe_experts && match->expert > 0) {
      return fmt::format("config.json says that there are {} experts ({})", config.num_moe_experts,
                         map.family->num_experts_key);
    }
    return why_not(*match, config);
  }
  return {};
}

// Heads that other libraries put beside a model or on it.
constexpr std::string_view kOtherHeads[] = {"score.", "v_head.", "qa_outputs.", "classifier."};

}  // namespace

std::string why_unmapped(const ModelMap& map, std::string_view hf_name) {
  const auto& names = *map.family->names;
  const auto prefix = names.layer.substr(0, names.layer.find('{'));
  if (hf_name.starts_with(prefix)) {
    auto rest = hf_name.substr(prefix.size());
    const auto layer = number_at(rest);
    if (!layer || !rest.starts_with('.')) return {};
    return why_not_in_layer(map, *layer, rest.substr(1));
  }
  for (const auto& match : {find_name(models::kEmbeddingSection, names.first, hf_name),
                            find_name(models::kHeadSection, names.last, hf_name)}) {
    if (match) return why_not(*match, map.config);
  }
  const auto is_of_head = [&](std::string_view head) { return hf_name.starts_with(head); };
  if (std::ranges::any_of(kOtherHeads, is_of_head)) {
    return "a head that is not read: heads are lm_head.weight, and score.weight with score.bias of "
           "ForSequenceClassification and ForTokenClassification (architectures)";
  }
  return {};
}

}  // namespace ferry::converter
