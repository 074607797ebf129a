#include "converter/families/model_map.h"

#include <algorithm>
#include <utility>

#include "distckpt/base/error.h"

namespace ferry::converter {
namespace {

using distckpt::Box;
using distckpt::ModelTensor;
using distckpt::Shape;
using models::Head;
using models::TransformerConfig;

constexpr std::string_view kEmbeddingName = "model.embed_tokens.weight";
constexpr std::string_view kHeadName = "lm_head.weight";

bool applies(When when, const TransformerConfig& config) {
  const bool language_model = config.head == Head::kLanguageModel;
  switch (when) {
    case When::kAlways:
      return true;
    case When::kQkvBias:
      return config.has_qkv_bias();
    case When::kLinearBias:
      return config.add_bias_linear;
    case When::kQkNorm:
      return config.qk_layernorm;
    case When::kUntied:
      return language_model && config.untie_embeddings_and_output_weights;
    case When::kScore:
      return !language_model;
    case When::kScoreBias:
      return config.head == Head::kTokenClassification;
    case When::kShared:
      return config.moe_shared_expert_intermediate_size > 0;
    case When::kSharedGate:
      return config.moe_shared_expert_gate;
    case When::kExpertBias:
      return config.moe_router_enable_expert_bias;
    case When::kQLora:
      return config.q_lora_rank > 0;
    case When::kNoQLora:
      return config.q_lora_rank == 0;
  }
  return false;
}

std::int64_t size_of_extent(Extent extent, const TransformerConfig& config, bool is_query) {
  const auto heads = config.num_attention_heads;
  switch (extent) {
    case Extent::kNone:
      return 0;
    case Extent::kHidden:
      return config.hidden_size;
    case Extent::kTwiceHidden:
      return 2 * config.hidden_size;
    case Extent::kFfn:
      return config.ffn_hidden_size;
    case Extent::kMoeFfn:
      return config.moe_ffn_hidden_size;
    case Extent::kSharedFfn:
      return config.moe_shared_expert_intermediate_size;
    case Extent::kExperts:
      return config.num_moe_experts;
    case Extent::kOne:
      return 1;
    case Extent::kHeads:
      return heads * config.kv_channels;
    case Extent::kGroups:
      return (is_query ? heads : config.num_query_groups) * config.kv_channels;
    case Extent::kChannels:
      return config.kv_channels;
    case Extent::kVocab:
      return config.vocab_size;
    case Extent::kLabels:
      return config.num_labels;
    case Extent::kQLora:
      return config.q_lora_rank;
    case Extent::kKvLora:
      return config.kv_lora_rank;
    case Extent::kKvLoraAndRope:
      return config.kv_lora_rank + config.qk_pos_emb_head_dim;
    case Extent::kQHeads:
      return heads * (config.qk_head_dim + config.qk_pos_emb_head_dim);
    case Extent::kKvHeads:
      return heads * (config.qk_head_dim + config.v_head_dim);
    case Extent::kVHeads:
      return heads * config.v_head_dim;
  }
  return 0;
}

// `text` with the mark replaced by a number; as it is where it has no mark.
std::string fill_in(std::string_view text, std::string_view mark, std::int64_t number) {
  const auto at = text.find(mark);
  if (at == std::string_view::npos) return std::string(text);
  return fmt::format("{}{}{}", text.substr(0, at), number, text.substr(at + mark.size()));
}

constexpr std::string_view kLayerMark = "{l}";
constexpr std::string_view kExpertMark = "{e}";

// "self_attn.{q,k}_proj" -> "self_attn.q_proj", "self_attn.k_proj".
std::vector<std::string> expand_braces(std::string_view text) {
  const auto open = text.find('{');
  if (open == std::string_view::npos) return {std::string(text)};
  const auto close = text.find('}', open);
  std::vector<std::string> names;
  auto choices = text.substr(open + 1, close - open - 1);
  while (true) {
    const auto comma = choices.find(',');
    names.push_back(fmt::format("{}{}{}", text.substr(0, open), choices.substr(0, comma),
                                text.substr(close + 1)));
    if (comma == std::string_view::npos) return names;
    choices.remove_prefix(comma + 1);
  }
}

// Rows [from, from + count) of a tensor of that shape.
Box rows_of(const Shape& shape, std::int64_t from, std::int64_t count) {
  Box box = Box::whole(shape);
  box.offset[0] = from;
  box.size[0] = count;
  return box;
}

// What the names of one layer, or of what surrounds the layers, begin with.
struct Section {
  Stage stage = Stage::kFirst;
  std::optional<std::int64_t> layer{};
  std::string hf{};        // "model.layers.3."
  std::string megatron{};  // "decoder.layers.3."
  std::string stacked{};   // "decoder.layers."; empty if never stacked
};

class Builder {
 public:
  explicit Builder(const TransformerConfig& config) {
    map_.config = config;
    map_.family = &find_family(config.family);
  }

  ModelMap build() {
    const auto& config = map_.config;
    const auto& rules = *map_.family->rules;
    add({.stage = Stage::kFirst}, rules.first);
    for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
      add_layer({.stage = Stage::kLayer,
                 .layer = layer,
                 .hf = fill_in(rules.hf_layer, kLayerMark, layer),
                 .megatron = fmt::format("{}{}.", rules.megatron_layer, layer),
                 .stacked = std::string(rules.megatron_layer)},
                config.is_moe_layer(layer));
    }
    add({.stage = Stage::kLast}, rules.last);
    for (std::int64_t j = 0; j < config.mtp_num_layers; ++j) add_prediction_layer(j);
    add_states({.stage = Stage::kLast}, rules.last_extra_states);
    if (config.head == Head::kLanguageModel && !config.untie_embeddings_and_output_weights) {
      map_.copies.emplace(kHeadName, map_.index.at(std::string(kEmbeddingName)));
    }
    return std::move(map_);
  }

 private:
  void add_layer(const Section& section, bool moe) {
    const auto& rules = *map_.family->rules;
    const auto& mlp = moe ? rules.moe_mlp : rules.dense_mlp;
    require(!mlp.empty(), ErrorKind::kLayout, "{}: the family {} has no layers {} experts",
            section.hf, map_.family->model_type, moe ? "with" : "without");
    add(section, rules.attention, rules.attention_also);
    add(section, mlp, moe ? rules.moe_also : rules.dense_also);
    add_states(section, rules.attention_extra_states);
    add_states(section, moe ? rules.moe_mlp_extra_states : rules.dense_mlp_extra_states);
  }

  void add_prediction_layer(std::int64_t index) {
    const auto& rules = *map_.family->rules;
    require(rules.mtp != nullptr, ErrorKind::kLayout, "the family {} has no prediction layers",
            map_.family->model_type);
    const auto& config = map_.config;
    Section section{.stage = Stage::kMtp,
                    .layer = index,
                    .hf = fill_in(rules.hf_layer, kLayerMark, config.num_layers + index),
                    .megatron = fmt::format("{}{}.", rules.mtp->megatron, index),
                    .stacked = {}};
    add(section, rules.mtp->rules);
    add_states(section, rules.mtp->extra_states);
    for (const auto& copy : rules.mtp->copies) {
      // A tied head is the embedding.
      const auto of = map_.index.find(std::string(copy.of));
      map_.copies.emplace(
          fmt::format("{}{}", section.hf, copy.hf),
          of != map_.index.end() ? of->second : map_.index.at(std::string(kEmbeddingName)));
    }
    section.megatron += rules.mtp->transformer_layer;
    add_layer(section, config.num_moe_experts > 0);
  }

  void add(const Section& section,
           std::span<const Rule> rules,
           std::span<const AlsoRule> also = {}) {
    for (const auto& rule : rules) {
      if (!applies(rule.when, map_.config)) continue;
      const bool experts = rule.hf.find(kExpertMark) != std::string_view::npos;
      for (std::int64_t e = 0; e < (experts ? map_.config.num_moe_experts : 1); ++e) {
        const auto models = add_models(section, rule, e);
        add_megatron(section, rule, experts ? std::optional(e) : std::nullopt, models, also);
      }
    }
  }

  std::vector<std::uint32_t> add_models(const Section& section,
                                        const Rule& rule,
                                        std::int64_t expert) {
    std::vector<std::uint32_t> models;
    for (const auto& name : expand_braces(fill_in(rule.hf, kExpertMark, expert))) {
      ModelTensor tensor{.name = section.hf + name, .shape = {}};
      const bool is_query = models.empty();
      tensor.shape.push_back(size_of_extent(rule.rows, map_.config, is_query));
      if (rule.columns != Extent::kNone) {
        tensor.shape.push_back(size_of_extent(rule.columns, map_.config, is_query));
      }
      const auto volume = checked_volume(tensor.shape);
      constexpr std::int64_t kMaxElementBytes = 8;
      std::int64_t bytes = 0;
      require(volume && !__builtin_mul_overflow(*volume, kMaxElementBytes, &bytes) &&
                  !__builtin_add_overflow(num_bytes_, bytes, &num_bytes_),
              ErrorKind::kLayout, "{}: has shape {} as the configuration says, which overflows",
              tensor.name, to_string(tensor.shape));
      models.push_back(static_cast<std::uint32_t>(map_.tensors.size()));
      map_.index.emplace(tensor.name, models.back());
      map_.tensors.push_back(std::move(tensor));
    }
    return models;
  }

  void add_megatron(const Section& section,
                    const Rule& rule,
                    std::optional<std::int64_t> expert,
                    const std::vector<std::uint32_t>& models,
                    std::span<const AlsoRule> also) {
    MegatronTensor tensor{.key = fmt::format("{}{}", section.megatron, rule.megatron),
                          .stacked_key = {},
                          .layer = section.layer,
                          .expert = expert,
                          .shape = map_.tensors[models.front()].shape,
                          .merge = rule.merge,
                          .split = rule.split,
                          .stage = section.stage,
                          .vocabulary = rule.rows == Extent::kVocab,
                          .fp32 = rule.fp32,
                          .parts = {}};
    if (!section.stacked.empty())
      tensor.stacked_key = fmt::format("{}{}", section.stacked, rule.megatron);
    for (const auto& other : also) {
      if (other.megatron != rule.megatron) continue;
      tensor.also.push_back(fmt::format("{}{}", section.megatron, other.also));
      if (!section.stacked.empty())
        tensor.also.push_back(fmt::format("{}{}", section.stacked, other.also));
    }
    tensor.shape[0] = 0;
    for (const auto model : models) tensor.shape[0] += map_.tensors[model].shape[0];
    std::int64_t at = 0;
    const auto add_part = [&](std::uint32_t model, std::int64_t from, std::int64_t count) {
      tensor.parts.push_back({.model = model,
                              .model_box = rows_of(map_.tensors[model].shape, from, count),
                              .box = rows_of(tensor.shape, at, count)});
      at += count;
    };
    if (rule.merge == Merge::kQkvGroups) {
      const auto groups = map_.config.num_query_groups;
      for (std::int64_t g = 0; g < groups; ++g) {
        for (const auto model : models) {
          const auto count = map_.tensors[model].shape[0] / groups;
          add_part(model, g * count, count);
        }
      }
    } else {
      for (const auto model : models) add_part(model, 0, map_.tensors[model].shape[0]);
    }
    map_.megatron.push_back(std::move(tensor));
  }

  void add_states(const Section& section, std::span<const ExtraStateRule> rules) {
    const bool stacked = !section.stacked.empty() && map_.config.is_homogeneous();
    for (const auto& rule : rules) {
      if (!applies(rule.when, map_.config)) continue;
      for (std::int64_t e = 0; e < (rule.per_expert ? map_.config.num_moe_experts : 1); ++e) {
        MegatronObject state{
            .object = {.key =
                           fmt::format("{}{}._extra_state",
                                       stacked ? section.stacked : section.megatron, rule.module)},
            .stage = section.stage,
            .layer = section.layer,
            .expert = rule.per_expert ? std::optional(e) : std::nullopt};
        auto& object = state.object;
        if (stacked) {
          object.global_shape.push_back(map_.config.num_layers);
          object.global_offset.push_back(*section.layer);
        }
        if (rule.per_expert) {
          object.global_shape.push_back(map_.config.num_moe_experts);
          object.global_offset.push_back(e);
        }
        if (object.global_shape.empty()) {
          object.global_shape.push_back(1);
          object.global_offset.push_back(0);
        }
        map_.extra_states.push_back(std::move(state));
      }
    }
  }

  ModelMap map_;
  std::int64_t num_bytes_ = 0;  // at most: so that no sum of sizes overflows later
};

}  // namespace

const std::string& ModelMap::written_key(const MegatronTensor& tensor) const {
  return !tensor.stacked_key.empty() && config.is_homogeneous() ? tensor.stacked_key : tensor.key;
}

std::string ModelMap::describe(const MegatronTensor& tensor) const {
  return tensor.expert ? fmt::format("{} of expert {}", tensor.key, *tensor.expert) : tensor.key;
}

ModelMap make_model_map(const TransformerConfig& config) {
  return Builder(config).build();
}

bool is_prediction_tensor(const TransformerConfig& config, std::string_view hf_name) {
  const auto pattern = find_family(config.family).rules->hf_layer;
  for (std::int64_t j = 0; j < config.mtp_num_layers; ++j) {
    if (hf_name.starts_with(fill_in(pattern, kLayerMark, config.num_layers + j))) return true;
  }
  return false;
}

}  // namespace ferry::converter
