#include "converter/model_map.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <utility>

#include "distckpt/error.h"

namespace ferry::converter {
namespace {

using distckpt::Box;
using distckpt::Dims;
using distckpt::ModelTensor;
using distckpt::ParallelConfig;
using distckpt::Shape;
using distckpt::ShardedObject;
using distckpt::ShardedTensor;
using distckpt::TransformerConfig;

bool applies(When when, const TransformerConfig& config) {
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
      return config.untie_embeddings_and_output_weights;
  }
  return false;
}

std::int64_t size_of_extent(Extent extent, const TransformerConfig& config, bool is_query) {
  const auto heads = config.num_attention_heads * config.kv_channels;
  switch (extent) {
    case Extent::kNone:
      return 0;
    case Extent::kHidden:
      return config.hidden_size;
    case Extent::kFfn:
      return config.ffn_hidden_size;
    case Extent::kHeads:
      return heads;
    case Extent::kGroups:
      return is_query ? heads : config.num_query_groups * config.kv_channels;
    case Extent::kChannels:
      return config.kv_channels;
    case Extent::kVocab:
      return config.vocab_size;
  }
  return 0;
}

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

std::string layer_prefix(std::string_view pattern, std::int64_t layer) {
  constexpr std::string_view kMark = "{l}";
  const auto at = pattern.find(kMark);
  return fmt::format("{}{}{}", pattern.substr(0, at), layer, pattern.substr(at + kMark.size()));
}

// Rows [from, from + count) of a tensor of that shape.
Box rows_of(const Shape& shape, std::int64_t from, std::int64_t count) {
  Box box = Box::whole(shape);
  box.offset[0] = from;
  box.size[0] = count;
  return box;
}

class Builder {
 public:
  explicit Builder(const TransformerConfig& config) {
    map_.config = config;
    map_.family = &find_family(config.family);
  }

  ModelMap build() {
    const auto& rules = *map_.family->rules;
    add_section(rules.first, Stage::kFirst, std::nullopt);
    for (std::int64_t layer = 0; layer < map_.config.num_layers; ++layer) {
      add_section(rules.layer, Stage::kLayer, layer);
    }
    add_section(rules.last, Stage::kLast, std::nullopt);
    return std::move(map_);
  }

 private:
  void add_section(std::span<const Rule> rules, Stage stage, std::optional<std::int64_t> layer) {
    const auto prefix = layer ? layer_prefix(map_.family->rules->hf_layer, *layer) : std::string();
    std::vector<std::vector<std::string>> names;
    for (const auto& rule : rules) {
      names.emplace_back();
      if (!applies(rule.when, map_.config)) continue;
      for (const auto& name : expand_braces(rule.hf)) {
        names.back().push_back(prefix + name);
        const bool is_query = names.back().size() == 1;
        ModelTensor tensor{.name = names.back().back(), .shape = {}};
        tensor.shape.push_back(size_of_extent(rule.rows, map_.config, is_query));
        if (rule.columns != Extent::kNone) {
          tensor.shape.push_back(size_of_extent(rule.columns, map_.config, is_query));
        }
        map_.index.emplace(tensor.name, static_cast<std::uint32_t>(map_.tensors.size()));
        map_.tensors.push_back(std::move(tensor));
      }
    }
    for (std::size_t i = 0; i < rules.size(); ++i) {
      if (!names[i].empty()) add_megatron(rules[i], stage, layer, names[i]);
    }
  }

  void add_megatron(const Rule& rule,
                    Stage stage,
                    std::optional<std::int64_t> layer,
                    const std::vector<std::string>& names) {
    MegatronTensor tensor{.name = std::string(rule.megatron),
                          .layer = layer,
                          .shape = {},
                          .merge = rule.merge,
                          .split = rule.split,
                          .stage = stage,
                          .vocabulary = rule.rows == Extent::kVocab,
                          .parts = {}};
    std::vector<std::uint32_t> models;
    std::int64_t rows = 0;
    for (const auto& name : names) {
      models.push_back(map_.index.at(name));
      rows += map_.tensors[models.back()].shape[0];
    }
    tensor.shape = map_.tensors[models.front()].shape;
    tensor.shape[0] = rows;
    std::int64_t at = 0;
    const auto add = [&](std::uint32_t model, std::int64_t from, std::int64_t count) {
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
          add(model, g * count, count);
        }
      }
    } else {
      for (const auto model : models) add(model, 0, map_.tensors[model].shape[0]);
    }
    map_.megatron.push_back(std::move(tensor));
  }

  ModelMap map_;
};

// Finds Megatron tensors in a checkpoint under any of their keys, and collects the links.
class Linker {
 public:
  Linker(const ModelMap& map, const distckpt::Layout& layout) : map_(map), layout_(layout) {
    for (std::uint32_t i = 0; i < layout.tensors().size(); ++i) {
      const auto& name = layout.tensor(i).name;
      const auto [_, added] = stored_.emplace(strip_wrappers(name), i);
      require(added, ErrorKind::kLayout, "{}: is there twice, with and without a prefix", name);
    }
    linked_.resize(layout.tensors().size());
  }

  distckpt::TensorMap link() {
    for (const auto& tensor : map_.megatron) link_tensor(tensor, 0);
    link_tied_copy();
    for (std::uint32_t i = 0; i < linked_.size(); ++i) {
      if (linked_[i]) continue;
      throw Error(ErrorKind::kLayout,
                  fmt::format("{}: no rule of the family {} maps it", layout_.tensor(i).name,
                              map_.family->model_type),
                  "is this the right configuration for this checkpoint?");
    }
    return std::move(result_);
  }

 private:
  void link_tensor(const MegatronTensor& tensor, int copy) {
    const auto& prefix = map_.family->rules->megatron_layer;
    if (tensor.layer) {
      const auto stacked = find(fmt::format("{}{}", prefix, tensor.name));
      if (stacked) return link_stored(tensor, *stacked, tensor.layer, tensor.shape[0], 0, copy);
    }
    const auto name = map_.full_name(tensor);
    if (const auto stored = find(name)) {
      return link_stored(tensor, *stored, std::nullopt, tensor.shape[0], 0, copy);
    }
    if (tensor.merge ==
        Merge::kGateUp) {  // singleton_local_shards: gate and up are tensors of their own
      const auto gate = find(name + "_w");
      const auto up = find(name + "_v");
      if (gate && up) {
        link_stored(tensor, *gate, std::nullopt, tensor.shape[0] / 2, 0, copy);
        return link_stored(tensor, *up, std::nullopt, tensor.shape[0] / 2, tensor.shape[0] / 2,
                           copy);
      }
    }
    const auto& stacked_name =
        tensor.layer ? fmt::format("{}{}", prefix, tensor.name) : std::string();
    std::vector<std::string_view> lost;
    for (const auto& part : tensor.parts) lost.push_back(map_.tensors[part.model].name);
    const auto repeats = std::ranges::unique(lost);
    lost.erase(repeats.begin(), repeats.end());
    fail(ErrorKind::kLayout, "{}: is missing{}; it would hold {}", name,
         tensor.layer ? fmt::format(", and so is {}", stacked_name) : "",
         lost.size() > 3 ? map_.tensors[tensor.parts.front().model].name + " and more"
                         : fmt::format("{}", fmt::join(lost, ", ")));
  }

  // Rows [from, from + rows) of `tensor` are what `stored` holds (in its layer `layer`, if it is
  // stacked).
  void link_stored(const MegatronTensor& tensor,
                   std::uint32_t stored_index,
                   std::optional<std::int64_t> layer,
                   std::int64_t rows,
                   std::int64_t from,
                   int copy) {
    const auto& stored = layout_.tensor(stored_index);
    linked_[stored_index] = true;
    Shape expected = tensor.shape;
    expected[0] = rows;
    if (layer) expected.push_front(map_.config.num_layers);
    const int row_dim = layer ? 1 : 0;
    Shape actual = stored.shape;
    if (tensor.vocabulary && actual.rank() == expected.rank() &&
        actual[row_dim] > expected[row_dim]) {
      Box padding = Box::whole(stored.shape);
      padding.offset[row_dim] = expected[row_dim];
      padding.size[row_dim] = actual[row_dim] - expected[row_dim];
      result_.padding.push_back({.stored = stored_index, .box = padding});
      actual[row_dim] = expected[row_dim];
    }
    require(actual == expected, ErrorKind::kLayout, "{}: has shape {}, expected {}{} for {}",
            stored.name, to_string(stored.shape), to_string(expected),
            tensor.vocabulary ? " or more rows" : "",
            map_.tensors[tensor.parts.front().model].name);
    for (const auto& part : tensor.parts) {
      if (part.box.offset[0] < from || part.box.end(0) > from + rows) continue;
      Box box = part.box;
      box.offset[0] -= from;
      if (layer) {
        box.offset.push_front(*layer);
        box.size.push_front(1);
      }
      result_.links.push_back({.model = part.model,
                               .model_box = part.model_box,
                               .stored = stored_index,
                               .stored_box = box,
                               .copy = copy});
    }
  }

  // A tied output layer that is stored all the same: a second copy of the embedding.
  void link_tied_copy() {
    if (map_.config.untie_embeddings_and_output_weights) return;
    const auto head = find("output_layer.weight");
    if (!head) return;
    for (const auto& tensor : map_.megatron) {
      if (tensor.stage == Stage::kFirst && tensor.vocabulary) {
        link_stored(tensor, *head, std::nullopt, tensor.shape[0], 0, 1);
      }
    }
  }

  std::optional<std::uint32_t> find(std::string_view name) const {
    const auto found = stored_.find(name);
    return found == stored_.end() ? std::nullopt : std::optional(found->second);
  }

  const ModelMap& map_;
  const distckpt::Layout& layout_;
  std::map<std::string_view, std::uint32_t> stored_;
  std::vector<bool> linked_;
  distckpt::TensorMap result_;
};

// The shards of one rank, built tensor by tensor.
class RankBuilder {
 public:
  RankBuilder(const ModelMap& map, const ParallelConfig& parallel, int tp_rank, int pp_rank)
      : map_(map), parallel_(parallel), tp_rank_(tp_rank), pp_rank_(pp_rank) {}

  void add_tensor(const MegatronTensor& tensor, distckpt::DType dtype) {
    Shape shape = tensor.shape;
    if (tensor.vocabulary) shape[0] = parallel_.padded_vocab_size(shape[0]);
    const auto tp = parallel_.tensor_model_parallel_size;
    if (tensor.split == Split::kNone) {
      return add_shard(tensor, dtype, shape, Box::whole(shape), {0, tp_rank_, 0});
    }
    const int dim = tensor.split == Split::kColumn ? 0 : 1;
    const int halves = tensor.merge == Merge::kGateUp ? 2 : 1;
    const auto units =
        tensor.merge == Merge::kQkvGroups ? map_.config.num_query_groups : shape[dim] / halves;
    require(units % tp == 0, ErrorKind::kUsage, "--tp {}: {} {} of {} cannot be split so", tp,
            units,
            tensor.merge == Merge::kQkvGroups ? "query groups"
            : dim == 0                        ? "rows"
                                              : "columns",
            map_.full_name(tensor));
    const auto local = shape[dim] / halves / tp;
    for (int half = 0; half < halves; ++half) {
      Box box = Box::whole(shape);
      box.offset[dim] = half * (shape[dim] / halves) + tp_rank_ * local;
      box.size[dim] = local;
      add_shard(tensor, dtype, shape, box, {0, 0, 0});
    }
  }

  void add_extra_states(std::span<const ExtraStateRule> rules, std::optional<std::int64_t> layer) {
    if (tp_rank_ != 0) return;
    for (const auto& rule : rules) {
      if (!applies(rule.when, map_.config)) continue;
      state.extra_states.push_back(
          {.key = fmt::format("{}{}._extra_state", layer ? map_.family->rules->megatron_layer : "",
                              rule.module),
           .global_shape = {layer ? map_.config.num_layers : 1},
           .global_offset = {layer.value_or(0)}});
    }
  }

  distckpt::RankState state;

 private:
  void add_shard(const MegatronTensor& tensor,
                 distckpt::DType dtype,
                 const Shape& shape,
                 const Box& box,
                 std::vector<int> replica_id) {
    ShardedTensor shard{.key = tensor.name,
                        .dtype = dtype,
                        .local_shape = box.size,
                        .global_shape = shape,
                        .global_offset = box.offset,
                        .replica_id = std::move(replica_id)};
    if (tensor.layer) {
      shard.key = fmt::format("{}{}", map_.family->rules->megatron_layer, tensor.name);
      shard.global_shape.push_front(map_.config.num_layers);
      shard.global_offset.push_front(*tensor.layer);
      shard.prepend_axis_num = 1;
    }
    state.tensors.push_back(std::move(shard));
  }

  const ModelMap& map_;
  const ParallelConfig& parallel_;
  int tp_rank_;
  int pp_rank_;
};

}  // namespace

std::string ModelMap::full_name(const MegatronTensor& tensor) const {
  if (!tensor.layer) return tensor.name;
  return fmt::format("{}{}.{}", family->rules->megatron_layer, *tensor.layer, tensor.name);
}

ModelMap make_model_map(const TransformerConfig& config) {
  return Builder(config).build();
}

distckpt::TensorMap link_megatron(const ModelMap& map, const distckpt::Layout& layout) {
  return Linker(map, layout).link();
}

std::vector<distckpt::RankState> sharded_state(const ModelMap& map,
                                               const std::vector<distckpt::DType>& dtypes,
                                               const ParallelConfig& parallel) {
  const auto& rules = *map.family->rules;
  const int tp = parallel.tensor_model_parallel_size;
  const int pp = parallel.pipeline_model_parallel_size;
  require(map.config.num_attention_heads % tp == 0, ErrorKind::kUsage,
          "--tp {}: {} attention heads cannot be split so", tp, map.config.num_attention_heads);
  const auto layers = parallel.layers_per_stage(static_cast<int>(map.config.num_layers));
  std::vector<distckpt::RankState> ranks;
  std::int64_t first_layer = 0;
  for (int pp_rank = 0; pp_rank < pp; ++pp_rank) {
    const auto end_layer = first_layer + layers[static_cast<std::size_t>(pp_rank)];
    for (int tp_rank = 0; tp_rank < tp; ++tp_rank) {
      RankBuilder rank(map, parallel, tp_rank, pp_rank);
      for (std::size_t i = 0; i < map.megatron.size(); ++i) {
        const auto& tensor = map.megatron[i];
        const bool here = tensor.stage == Stage::kFirst ? pp_rank == 0
                          : tensor.stage == Stage::kLast
                              ? pp_rank == pp - 1
                              : *tensor.layer >= first_layer && *tensor.layer < end_layer;
        if (here) rank.add_tensor(tensor, dtypes[i]);
      }
      for (auto layer = first_layer; layer < end_layer; ++layer) {
        rank.add_extra_states(rules.layer_extra_states, layer);
      }
      if (pp_rank == pp - 1) rank.add_extra_states(rules.last_extra_states, std::nullopt);
      ranks.push_back(std::move(rank.state));
    }
    first_layer = end_layer;
  }
  return ranks;
}

std::string_view strip_wrappers(std::string_view key) {
  constexpr std::string_view kWrapper = "module.";
  while (key.starts_with(kWrapper)) key.remove_prefix(kWrapper.size());
  return key;
}

bool is_training_state(std::string_view key) {
  key = strip_wrappers(key);
  constexpr std::array<std::string_view, 4> kPrefixes{"optimizer.", "chained_", "rng_state",
                                                      "rerun_state_machine"};
  return std::ranges::any_of(kPrefixes, [&](auto prefix) { return key.starts_with(prefix); });
}

void check_object_keys(const ModelMap& map, const std::vector<std::string>& keys) {
  constexpr std::string_view kExtraState = "._extra_state";
  const auto& rules = *map.family->rules;
  std::set<std::string> modules;  // that may have an extra state
  const auto add = [&](std::span<const ExtraStateRule> list, std::string_view prefix) {
    for (const auto& rule : list) modules.insert(fmt::format("{}{}", prefix, rule.module));
  };
  add(rules.last_extra_states, "");
  add(rules.layer_extra_states, rules.megatron_layer);
  for (std::int64_t layer = 0; layer < map.config.num_layers; ++layer) {
    add(rules.layer_extra_states, fmt::format("{}{}.", rules.megatron_layer, layer));
  }
  std::map<std::string, std::pair<Shape, std::int64_t>> found;  // per module: shape and how many
  for (const auto& text : keys) {
    if (is_training_state(text)) continue;
    const auto object = distckpt::parse_unique_key(strip_wrappers(text));
    const auto key = object ? std::string_view(object->key) : std::string_view();
    const auto module = key.substr(0, key.size() - std::min(key.size(), kExtraState.size()));
    require(key.ends_with(kExtraState) && modules.contains(std::string(module)),
            ErrorKind::kCorrupt, "{}: the object is not one that a model of family {} has", text,
            map.family->model_type);
    auto& [shape, count] =
        found.try_emplace(std::string(module), object->global_shape, 0).first->second;
    require(shape == object->global_shape, ErrorKind::kCorrupt,
            "{}: others of its kind say shape {}", text, to_string(shape));
    ++count;
  }
  for (const auto& [module, state] : found) {
    require(state.first.product() == state.second, ErrorKind::kCorrupt,
            "{}._extra_state: {} of {} parts are there", module, state.second,
            state.first.product());
  }
}

}  // namespace ferry::converter
