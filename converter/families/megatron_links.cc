#include "converter/families/megatron_links.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <utility>

#include "converter/families/tower.h"
#include "distckpt/base/error.h"

namespace ferry::converter {
namespace {

using distckpt::Box;
using distckpt::Shape;
using models::strip_wrappers;
using models::with_expert;

// The form in which a stored tensor holds a Megatron tensor.
struct Form {
  std::string key{};
  bool layers = false;    // its first axis counts the decoder's layers
  bool experts = false;   // its next axis counts experts
  std::int64_t from = 0;  // rows of the Megatron tensor that it holds
  std::int64_t num_rows = 0;
};

class Linker {
 public:
  Linker(const ModelMap& map,
         const distckpt::Layout& layout,
         std::string_view prefix,
         LinkedSide side)
      : map_(map), layout_(layout), side_(side) {
    for (std::uint32_t i = 0; i < layout.tensors().size(); ++i) {
      const auto& name = layout.tensor(i).name;
      const auto key = prefix.empty() ? language_model_key(name) : strip_wrappers(name);
      const bool of_tower = strip_wrappers(name).starts_with(models::kVisionModel);
      const bool beside = map.is_tower()
                              ? !of_tower
                              : is_tower_key(*map.family, name) || (map.trains_tower && of_tower);
      if (prefix.empty() ? is_training_state(key) || beside : !key.starts_with(prefix)) continue;
      const auto [_, added] = stored_.emplace(key, i);
      require(added, ErrorKind::kLayout, "{}: is there twice, with and without a prefix", name);
    }
  }

  distckpt::TensorMap link() {
    for (const auto& tensor : map_.megatron) link_tensor(tensor);
    link_tied_copy();
    for (const auto& [key, index] : stored_) {
      if (linked_.contains(index)) continue;
      throw Error(ErrorKind::kLayout,
                  fmt::format("{}: no rule of the family {} maps it", layout_.tensor(index).name,
                              map_.family->model_type),
                  "is this the right configuration for this checkpoint?");
    }
    return std::move(result_);
  }

 private:
  // The forms in which checkpoints keep a tensor; each is one stored tensor, or two that lie above
  // each other.
  std::vector<std::vector<Form>> forms_of(const MegatronTensor& tensor) const {
    const auto rows = tensor.shape[0];
    const bool experts = tensor.expert.has_value();
    std::vector<std::vector<Form>> forms;
    const auto whole = [&](std::string key, bool layers, bool expert_axis) {
      forms.push_back({{.key = std::move(key),
                        .layers = layers,
                        .experts = expert_axis,
                        .from = 0,
                        .num_rows = rows}});
    };
    if (!tensor.stacked_key.empty()) whole(tensor.stacked_key, true, experts);
    whole(tensor.key, false, experts);
    for (std::size_t i = 0; i < tensor.also.size(); ++i) whole(tensor.also[i], i == 1, experts);
    // singleton_local_shards: experts, gate and up are tensors of their own.
    const auto single = single_key(tensor);
    if (experts) whole(single, false, false);
    if (tensor.merge == Merge::kGateUp) {
      forms.push_back({{.key = single + "_w", .from = 0, .num_rows = rows / 2},
                       {.key = single + "_v", .from = rows / 2, .num_rows = rows / 2}});
    }
    return forms;
  }

  void link_tensor(const MegatronTensor& tensor) {
    for (const auto& form : forms_of(tensor)) {
      const bool there =
          std::ranges::all_of(form, [&](const Form& part) { return find(part.key).has_value(); });
      if (!there) continue;
      for (const auto& part : form) link_stored(tensor, *find(part.key), part, 0);
      return;
    }
    std::vector<std::string_view> lost;
    for (const auto& part : tensor.parts) lost.push_back(map_.tensors[part.model].name);
    const auto repeats = std::ranges::unique(lost);
    lost.erase(repeats.begin(), repeats.end());
    fail(ErrorKind::kLayout, "{}: is missing{}; it would hold {}", map_.describe(tensor),
         tensor.stacked_key.empty() ? "" : fmt::format(", and so is {}", tensor.stacked_key),
         lost.size() > 3 ? map_.tensors[tensor.parts.front().model].name + " and more"
                         : fmt::format("{}", fmt::join(lost, ", ")));
  }

  void link_stored(const MegatronTensor& tensor,
                   std::uint32_t stored_index,
                   const Form& form,
                   int copy) {
    const auto& stored = layout_.tensor(stored_index);
    linked_.insert(stored_index);
    Box leading;  // which layer and expert of the stored tensor it is
    Shape expected;
    const auto add_axis = [&](std::int64_t size, std::int64_t index) {
      expected.push_back(size);
      leading.offset.push_back(index);
      leading.size.push_back(1);
    };
    if (form.layers) add_axis(tensor.stack_size, tensor.stack_index);
    if (form.experts) add_axis(map_.config.num_moe_experts, *tensor.expert);
    const int row_dim = expected.rank();
    expected.push_back(form.num_rows);
    for (int d = 1; d < tensor.shape.rank(); ++d) expected.push_back(tensor.shape[d]);
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
    const auto in_stored = [&](const Box& part) {
      Box box = leading;
      for (int d = 0; d < part.rank(); ++d) {
        box.offset.push_back(part.offset[d] - (d == 0 ? form.from : 0));
        box.size.push_back(part.size[d]);
      }
      return box;
    };
    for (const auto& unused : tensor.unused) {
      result_.padding.push_back({.stored = stored_index,
                                 .box = in_stored(unused),
                                 .ones = tensor.merge != Merge::kQkvGroups});
    }
    for (const auto& part : tensor.parts) {
      if (part.box.offset[0] < form.from || part.box.end(0) > form.from + form.num_rows) continue;
      if (part.box.size[0] == 0) continue;  // a norm that is not used
      const auto box = in_stored(part.box);
      if (part.copy > 0 && side_ == LinkedSide::kSource) {
        result_.left_out.push_back({.stored = stored_index, .box = box});
        continue;
      }
      result_.links.push_back({.model = part.model,
                               .model_box = part.model_box,
                               .stored = stored_index,
                               .stored_box = box,
                               .copy = copy + part.copy,
                               .axes = part.axes,
                               .less = tensor.less_one ? 1 : 0});
    }
  }

  // A tied output layer that is stored all the same: a second copy of the embedding.
  void link_tied_copy() {
    if (!map_.config.is_tied()) return;
    const auto head = find(models::kOutputLayerKey);
    if (!head) return;
    for (const auto& tensor : map_.megatron) {
      if (tensor.stage != Stage::kFirst || !tensor.vocabulary) continue;
      link_stored(tensor, *head, {.key = {}, .num_rows = tensor.shape[0]}, 1);
    }
  }

  std::optional<std::uint32_t> find(std::string_view name) const {
    const auto found = stored_.find(name);
    return found == stored_.end() ? std::nullopt : std::optional(found->second);
  }

  const ModelMap& map_;
  const distckpt::Layout& layout_;
  LinkedSide side_;
  std::map<std::string_view, std::uint32_t> stored_;
  std::set<std::uint32_t> linked_;
  distckpt::TensorMap result_;
};

}  // namespace

distckpt::TensorMap link_megatron(const ModelMap& map,
                                  const distckpt::Layout& layout,
                                  LinkedSide side,
                                  std::string_view prefix) {
  return Linker(map, layout, prefix, side).link();
}

bool is_training_state(std::string_view key) {
  key = strip_wrappers(key);
  constexpr std::array<std::string_view, 5> kPrefixes{"optimizer.", "chained_", "rng_state",
                                                      "rerun_state_machine", kTrainerPrefix};
  return std::ranges::any_of(kPrefixes, [&](auto prefix) { return key.starts_with(prefix); });
}

void check_object_keys(const ModelMap& map, const std::vector<std::string>& keys) {
  // Every key that some form of some module's extra state may have.
  std::set<std::string> known;
  for (const auto& state : map.extra_states) {
    const auto& key = state.object.key;
    known.insert(key);
    auto single = key;
    if (state.stage == Stage::kLayer && map.config.is_homogeneous()) {
      single = fmt::format("{}{}.{}", models::kDecoderLayers, *state.layer,
                           std::string_view(key).substr(models::kDecoderLayers.size()));
      known.insert(single);
    }
    if (state.expert) known.insert(with_expert(single, *state.expert));
  }
  std::map<std::string, std::pair<Shape, std::int64_t>> found;  // per key: shape and how many
  for (const auto& text : keys) {
    if (is_training_state(text)) continue;
    const auto object = distckpt::parse_unique_key(language_model_key(text));
    if (object && is_tower_key(*map.family, object->key)) continue;
    require(object && known.contains(object->key), ErrorKind::kCorrupt,
            "{}: the object is not one that a model of family {} has", text,
            map.family->model_type);
    auto& [shape, count] = found.try_emplace(object->key, object->global_shape, 0).first->second;
    require(shape == object->global_shape, ErrorKind::kCorrupt,
            "{}: others of its kind say shape {}", text, to_string(shape));
    ++count;
  }
  for (const auto& [key, state] : found) {
    require(state.first.product() == state.second, ErrorKind::kCorrupt,
            "{}: {} of {} parts are there", key, state.second, state.first.product());
  }
}

}  // namespace ferry::converter
