#include "converter/families/tower.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/json.h"

namespace ferry::converter {
namespace {

using distckpt::Box;
using distckpt::ModelTensor;
using distckpt::Shape;

constexpr std::string_view kAny = "**";

constexpr std::array<std::pair<MegatronLayout, std::string_view>, 4> kLayoutNames{{
    {MegatronLayout::kLanguageModel, "language-model"},
    {MegatronLayout::kMegatronBridge, "megatron-bridge"},
    {MegatronLayout::kMbridge, "mbridge"},
    {MegatronLayout::kSlime, "slime"},
}};

std::span<const TowerRule> rules_of(const Family& family, MegatronLayout layout) {
  switch (layout) {
    case MegatronLayout::kMegatronBridge:
      return family.names->bridge_tower;
    case MegatronLayout::kMbridge:
      return family.names->mbridge_tower;
    default:
      return {};
  }
}

// A pattern that ends in ** stands for all that begin so.
bool is_open(std::string_view pattern) {
  return pattern.ends_with(kAny);
}
std::string_view opening(std::string_view pattern) {
  return pattern.substr(0, pattern.size() - kAny.size());
}
bool matches_rule(std::string_view pattern, std::string_view key) {
  return is_open(pattern) ? key.starts_with(opening(pattern)) : key == pattern;
}

// Modules of Transformer Engine in towers of Megatron's modules.
constexpr std::array<std::string_view, 8> kEngineModules{
    ".linear_qkv",
    ".linear_proj",
    ".linear_fc1",
    ".linear_fc2",
    ".patch_norm",
    ".final_layernorm",
    "multi_modal_projector.mm_soft_embed_norm",
    "multi_modal_projector.proj",
};

// The module whose weight a key is, if it keeps an `_extra_state`.
std::optional<std::string_view> engine_module(std::string_view key) {
  constexpr std::string_view kEnd = ".weight";
  if (!key.ends_with(kEnd)) return std::nullopt;
  key.remove_suffix(kEnd.size());
  const bool keeps = std::ranges::any_of(
      kEngineModules, [&](std::string_view module) { return key.ends_with(module); });
  return keeps ? std::optional(key) : std::nullopt;
}

bool is_stacked(const TowerRule& rule) {
  return rule.hf.find(kLayerMark) != std::string_view::npos;
}

// The tensors that a rule names, of one layer.
std::vector<std::string> names_of(const TowerRule& rule, std::int64_t layer) {
  return expand_braces(fill_in(rule.hf, kLayerMark, layer));
}

// The same element in both: a box of a tensor in Hugging Face terms, and one of the stored tensor.
struct TowerPart {
  std::uint32_t model = 0;
  Box model_box{};
  Box box{};
};

struct TowerTensor {
  std::string key{};
  Shape shape{};
  distckpt::DType dtype = distckpt::DType::kBF16;
  bool transposed = false;
  std::int64_t num_states = 0;  // `_extra_state`s of its module: one for each layer of a stack
  std::vector<TowerPart> parts{};
};

class Tower {
 public:
  Tower(const ModelMap& map,
        MegatronLayout layout,
        const std::vector<ModelTensor>& tensors,
        std::int64_t num_heads)
      : tensors_(tensors), num_heads_(num_heads) {
    for (std::uint32_t i = 0; i < tensors.size(); ++i) {
      if (map.is_carried(tensors[i].name)) rest_.emplace(tensors[i].name, i);
    }
    const auto rules = rules_of(*map.family, layout);
    require(!rules.empty() || layout == MegatronLayout::kLanguageModel, ErrorKind::kUsage,
            "--megatron-layout {}: models of the family {} are not kept so", layout_name(layout),
            map.family->model_type);
    for (const auto& rule : rules) {
      if (is_open(rule.hf)) {
        add_all(rule);
      } else {
        add(rule);
      }
    }
    require(rest_.empty() || rules.empty(), ErrorKind::kLayout,
            "{}: the layout {} has no place for it", rest_.empty() ? "" : rest_.begin()->first,
            layout_name(layout));
  }

  std::vector<TowerTensor> take() { return std::move(found_); }

 private:
  void add_all(const TowerRule& rule) {
    const auto begins = opening(rule.hf);
    for (auto at = rest_.lower_bound(begins); at != rest_.end() && at->first.starts_with(begins);) {
      const auto& tensor = tensors_[at->second];
      TowerTensor tower{
          .key = fmt::format("{}{}", opening(rule.megatron), at->first.substr(begins.size())),
          .shape = tensor.shape,
          .dtype = tensor.dtype};
      tower.parts.push_back({.model = at->second,
                             .model_box = Box::whole(tensor.shape),
                             .box = Box::whole(tensor.shape)});
      found_.push_back(std::move(tower));
      at = rest_.erase(at);
    }
  }

  // Nothing where no tensor of the rule is there: the tower was left out, or its family has none
  // such. All of a stack, else.
  void add(const TowerRule& rule) {
    std::vector<std::vector<std::uint32_t>> layers;  // the rule's tensors of each layer
    for (std::int64_t layer = 0; layer == 0 || is_stacked(rule); ++layer) {
      const auto names = names_of(rule, layer);
      if (std::ranges::none_of(names, [&](const auto& name) { return rest_.contains(name); }))
        break;
      auto& own = layers.emplace_back();
      for (const auto& name : names) {
        const auto at = rest_.find(name);
        require(at != rest_.end(), ErrorKind::kLayout, "{}: is missing beside {}", name,
                names.front());
        own.push_back(at->second);
        rest_.erase(at);
      }
    }
    if (layers.empty()) return;
    const auto& first = tensors_[layers.front().front()];
    Shape one = first.shape;
    one[0] = 0;
    for (const auto index : layers.front()) one[0] += tensors_[index].shape[0];
    if (rule.transposed) std::swap(one[0], one[1]);
    TowerTensor tower{.key = std::string(rule.megatron),
                      .shape = one,
                      .dtype = first.dtype,
                      .transposed = rule.transposed};
    if (engine_module(tower.key)) tower.num_states = std::ssize(layers);
    if (is_stacked(rule)) tower.shape.push_front(std::ssize(layers));
    for (std::size_t layer = 0; layer < layers.size(); ++layer) {
      std::int64_t at = 0;
      for (const auto index : layers[layer]) {
        const auto& tensor = tensors_[index];
        require(tensor.dtype == first.dtype, ErrorKind::kLayout, "{}: is {}, and {} is {}",
                tensor.name, short_name(tensor.dtype), first.name, short_name(first.dtype));
        const auto begin = tower.parts.size();
        if (rule.heads) {
          add_heads(tensor, index, tower);
        } else if (rule.transposed) {
          tower.parts.push_back(
              {.model = index, .model_box = Box::whole(tensor.shape), .box = Box::whole(one)});
        } else {
          tower.parts.push_back({.model = index,
                                 .model_box = Box::whole(tensor.shape),
                                 .box = rows_of(one, at, tensor.shape[0])});
        }
        at += tensor.shape[0];
        if (!is_stacked(rule)) continue;
        for (auto part = begin; part < tower.parts.size(); ++part) {
          tower.parts[part].box.offset.push_front(static_cast<std::int64_t>(layer));
          tower.parts[part].box.size.push_front(1);
        }
      }
    }
    found_.push_back(std::move(tower));
  }

  // All queries, then all keys, then all values: in Megatron head by head.
  void add_heads(const ModelTensor& tensor, std::uint32_t index, TowerTensor& tower) const {
    constexpr std::int64_t kProjections = 3;
    const auto rows = tensor.shape[0];
    require(num_heads_ > 0 && rows % (kProjections * num_heads_) == 0, ErrorKind::kLayout,
            "{}: {} rows are no queries, keys and values of {} heads (vision_config: num_heads)",
            tensor.name, rows, num_heads_);
    const auto channels = rows / kProjections / num_heads_;
    for (std::int64_t head = 0; head < num_heads_; ++head) {
      for (std::int64_t kind = 0; kind < kProjections; ++kind) {
        tower.parts.push_back(
            {.model = index,
             .model_box = rows_of(tensor.shape, (kind * num_heads_ + head) * channels, channels),
             .box = rows_of(tensor.shape, (head * kProjections + kind) * channels, channels)});
      }
    }
  }

  const std::vector<ModelTensor>& tensors_;
  std::int64_t num_heads_;
  std::map<std::string, std::uint32_t, std::less<>> rest_;  // of the tower, without a place yet
  std::vector<TowerTensor> found_;
};

}  // namespace

bool keeps_tower(MegatronLayout layout) {
  return layout == MegatronLayout::kMegatronBridge || layout == MegatronLayout::kMbridge;
}

std::string_view layout_name(MegatronLayout layout) {
  return std::ranges::find(kLayoutNames, layout, &decltype(kLayoutNames)::value_type::first)
      ->second;
}

std::optional<MegatronLayout> megatron_layout(std::string_view name) {
  const auto* const found =
      std::ranges::find(kLayoutNames, name, &decltype(kLayoutNames)::value_type::second);
  return found == kLayoutNames.end() ? std::nullopt : std::optional(found->first);
}

MegatronLayout written_layout(const Family& family, MegatronLayout layout) {
  const auto own = rules_of(family, MegatronLayout::kMbridge);
  const bool alike =
      !own.empty() && own.data() == rules_of(family, MegatronLayout::kMegatronBridge).data();
  return layout == MegatronLayout::kMbridge && alike ? MegatronLayout::kMegatronBridge : layout;
}

std::string_view language_model_key(std::string_view key) {
  key = models::strip_wrappers(key);
  if (key.starts_with(kLanguageModelPrefix)) key.remove_prefix(kLanguageModelPrefix.size());
  return key;
}

bool is_tower_key(const Family& family, std::string_view key) {
  key = models::strip_wrappers(key);
  const bool state = key.ends_with("._extra_state");
  for (const auto layout : {MegatronLayout::kMegatronBridge, MegatronLayout::kMbridge}) {
    for (const auto& rule : rules_of(family, layout)) {
      const auto module = rule.megatron.substr(0, rule.megatron.find('.') + 1);
      if (state ? key.starts_with(module) : matches_rule(rule.megatron, key)) return true;
    }
  }
  return false;
}

MegatronLayout layout_of(const Family& family, const distckpt::Layout& stored) {
  auto layout = MegatronLayout::kLanguageModel;
  for (const auto& tensor : stored.tensors()) {
    const auto key = models::strip_wrappers(tensor.name);
    const auto is_of = [&](MegatronLayout one) {
      return std::ranges::any_of(rules_of(family, one),
                                 [&](auto& rule) { return matches_rule(rule.megatron, key); });
    };
    const bool is_of_bridge = is_of(MegatronLayout::kMegatronBridge);
    if (!is_of_bridge && is_of(MegatronLayout::kMbridge)) return MegatronLayout::kMbridge;
    const bool below = key.starts_with(kLanguageModelPrefix) &&
                       !rules_of(family, MegatronLayout::kMegatronBridge).empty();
    if (below || is_of_bridge) layout = MegatronLayout::kMegatronBridge;
  }
  return layout;
}

std::vector<ModelTensor> tower_tensors(const Family& family,
                                       MegatronLayout layout,
                                       const distckpt::Layout& stored) {
  std::vector<ModelTensor> tensors;
  const auto rules = rules_of(family, layout);
  std::set<std::string_view> found;
  for (const auto& tensor : stored.tensors()) {
    const auto key = models::strip_wrappers(tensor.name);
    const auto rule = std::ranges::find_if(
        rules, [&](const TowerRule& one) { return matches_rule(one.megatron, key); });
    if (rule == rules.end()) continue;
    found.insert(rule->megatron);
    auto shape = tensor.shape;
    if (is_open(rule->megatron)) {
      tensors.push_back({.name = fmt::format("{}{}", opening(rule->hf),
                                             key.substr(opening(rule->megatron).size())),
                         .dtype = tensor.dtype,
                         .shape = shape});
      continue;
    }
    const auto names = std::ssize(names_of(*rule, 0));
    const int stacked = is_stacked(*rule) ? 1 : 0;
    require(shape.rank() > stacked + (rule->transposed ? 1 : 0) && shape[stacked] % names == 0,
            ErrorKind::kLayout, "{}: has shape {}, which is not that of {}", tensor.name,
            to_string(shape), rule->hf);
    const auto layers = stacked != 0 ? shape[0] : 1;
    Shape one;
    for (int d = stacked; d < shape.rank(); ++d) one.push_back(shape[d]);
    one[0] /= names;
    if (rule->transposed) std::swap(one[0], one[1]);
    for (std::int64_t layer = 0; layer < layers; ++layer) {
      for (auto& name : names_of(*rule, layer))
        tensors.push_back({.name = std::move(name), .dtype = tensor.dtype, .shape = one});
    }
  }
  const auto is_found = [&](const TowerRule& rule) { return found.contains(rule.megatron); };
  const bool has_optional = std::ranges::any_of(
      rules, [&](const TowerRule& rule) { return rule.optional && is_found(rule); });
  for (const auto& rule : rules) {
    const bool may_lack = is_open(rule.megatron) || (rule.optional && !has_optional);
    require(found.empty() || may_lack || is_found(rule), ErrorKind::kLayout,
            "{} is missing beside the rest of the tower", rule.megatron);
  }
  return tensors;
}

TowerState tower_state(const ModelMap& map,
                       MegatronLayout layout,
                       const std::vector<ModelTensor>& tensors,
                       std::int64_t num_heads) {
  TowerState state;
  for (auto& tensor : Tower(map, layout, tensors, num_heads).take()) {
    for (std::int64_t i = 0; i < tensor.num_states; ++i) {
      state.extra_states.push_back(
          {.key = fmt::format("{}._extra_state", engine_module(tensor.key).value()),
           .global_shape = {tensor.num_states},
           .global_offset = {i}});
    }
    state.tensors.push_back({.key = std::move(tensor.key),
                             .dtype = tensor.dtype,
                             .local_shape = tensor.shape,
                             .global_shape = tensor.shape,
                             .global_offset = Box::whole(tensor.shape).offset,
                             .replica_id = {0, 0, 0}});
  }
  return state;
}

void link_tower(const ModelMap& map,
                MegatronLayout layout,
                const std::vector<ModelTensor>& tensors,
                std::int64_t num_heads,
                const distckpt::Layout& stored,
                distckpt::TensorMap& links) {
  std::map<std::string_view, std::uint32_t> keys;
  for (std::uint32_t i = 0; i < stored.tensors().size(); ++i)
    keys.emplace(models::strip_wrappers(stored.tensor(i).name), i);
  for (const auto& tensor : Tower(map, layout, tensors, num_heads).take()) {
    const auto at = keys.find(tensor.key);
    require(at != keys.end(), ErrorKind::kLayout, "{}: is missing", tensor.key);
    const auto& found = stored.tensor(at->second);
    require(found.shape == tensor.shape, ErrorKind::kLayout, "{}: has shape {}, expected {}",
            found.name, to_string(found.shape), to_string(tensor.shape));
    for (const auto& part : tensor.parts) {
      links.links.push_back({.model = part.model,
                             .model_box = part.model_box,
                             .stored = at->second,
                             .stored_box = part.box,
                             .axes = tensor.transposed ? distckpt::Dims{1, 0} : distckpt::Dims{}});
    }
  }
}

std::optional<std::string> tower_name(std::span<const TowerRule> rules, std::string_view key) {
  for (const auto& rule : rules) {
    auto pattern = rule.megatron;
    auto rest = key;
    auto name = std::string(rule.hf);
    if (const auto at = pattern.find(kLayerMark); at != std::string_view::npos) {
      if (!rest.starts_with(pattern.substr(0, at))) continue;
      rest.remove_prefix(at);
      const auto layer = rest.substr(0, rest.find('.'));
      pattern.remove_prefix(at + kLayerMark.size());
      rest.remove_prefix(layer.size());
      name.replace(name.find(kLayerMark), kLayerMark.size(), layer);
    }
    if (!matches_rule(pattern, rest)) continue;
    if (!is_open(pattern)) return name;
    return fmt::format("{}{}", opening(name), rest.substr(opening(pattern).size()));
  }
  return std::nullopt;
}

std::int64_t tower_heads(std::string_view config_text, std::string_view source) {
  const auto config = distckpt::parse_python_json(config_text, source);
  const auto* const key = "vision_config";
  if (!config.is_object() || !config.contains(key) || !config.at(key).is_object()) return 0;
  const auto& vision = config.at(key);
  if (!vision.contains("num_heads")) return 0;
  return distckpt::json_int(vision.at("num_heads"), "num_heads", source);
}

}  // namespace ferry::converter
