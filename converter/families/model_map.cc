#include "converter/families/model_map.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "converter/families/tower.h"
#include "distckpt/base/error.h"

namespace ferry::converter {
namespace {

using distckpt::Box;
using distckpt::ModelTensor;
using distckpt::Shape;
using models::ParameterRow;
using models::Section;
using models::TransformerConfig;

constexpr std::string_view kExpertMark = "{e}";

// The form in which a tensor holds a parameter, or its parts, of one expert or of all.
struct HfShape {
  bool stacked = false;  // of all experts
  bool merged = false;   // of all parts
  bool as_row = false;
  bool transposed = false;
  bool interleaved = false;

  Shape of(Shape parameter, std::int64_t num_experts) const {
    if (transposed) std::swap(parameter[0], parameter[1]);
    if (as_row) parameter.push_front(1);
    if (stacked) parameter.push_front(num_experts);
    return parameter;
  }

  // Rows `box` of a parameter, of part `index`, as a box of the tensor's grid.
  MappedPart part(const Box& box, std::int64_t index, std::int64_t expert) const {
    MappedPart mapped{.model_box = box};
    auto& [offset, size] = mapped.model_box;
    if (transposed) {
      std::swap(offset[0], offset[1]);
      std::swap(size[0], size[1]);
    }
    if (as_row) {
      offset.push_front(0);
      size.push_front(1);
    }
    if (stacked) {
      offset.push_front(expert);
      size.push_front(1);
    }
    if (interleaved) {
      offset.push_back(index);
      size.push_back(1);
    }
    if (!transposed && !interleaved) return mapped;
    const int first = stacked ? 1 : 0;
    for (int d = 0; d < box.rank(); ++d)
      mapped.axes.push_back(first + (transposed ? box.rank() - 1 - d : d));
    return mapped;
  }
};

class Builder {
 public:
  Builder(const TransformerConfig& config, const FindTensor& find) : find_(find) {
    map_.config = config;
    map_.family = &family_of(config.family);
  }

  // The tower alone, in the order of its parameters.
  ModelMap build_vision() {
    const auto rules = map_.family->names->computed_tower;
    require(map_.config.vision && !rules.empty(), ErrorKind::kLayout,
            "models of the family {} have no vision tower that is computed",
            map_.family->model_type);
    for (const auto& section : models::vision_sections(map_.config)) {
      for (const auto& row : section.table->rows) {
        MegatronTensor tensor{models::make_parameter(section, row, map_.config, std::nullopt)};
        const auto name = tower_name(rules, tensor.key);
        require(name.has_value(), ErrorKind::kLayout, "{}: the family {} names no tensor for it",
                tensor.key, map_.family->model_type);
        const auto whole = Box::whole(tensor.shape);
        tensor.parts.push_back(
            {.model = add_model(*name, tensor.shape), .model_box = whole, .box = whole});
        map_.megatron.push_back(std::move(tensor));
      }
    }
    return std::move(map_);
  }

  // The number of elements of all tensors. Experts of a layer are alike: one of them is looked at.
  std::int64_t count() {
    counts_only_ = true;
    build();
    return num_elements_;
  }

  ModelMap build() {
    const auto& config = map_.config;
    const auto& names = *map_.family->names;
    if (map_.family->passes_through) return std::move(map_);
    const Section first{.stage = Stage::kFirst, .table = &models::kEmbeddingSection};
    const Section last{.stage = Stage::kLast, .table = &models::kHeadSection};
    add({first}, names.first, "");
    add_states(first);
    for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
      add_layer(models::layer_sections(config, layer), fill_in(names.layer, kLayerMark, layer));
    }
    add({last}, names.last, "");
    for (std::int64_t j = 0; j < config.mtp_num_layers; ++j) add_prediction_layer(j);
    add_states(last);
    if (config.is_tied()) map_.copies.emplace(names.output_layer(), embedding());
    return std::move(map_);
  }

 private:
  // The index of the embedding's tensor.
  std::uint32_t embedding() const {
    return map_.index.at(std::string(map_.family->names->embedding()));
  }

  static std::span<const HfName> names_of(const HfNames& names,
                                          const models::ParameterSection* table) {
    if (table == &models::kGatedDeltaNetSection) return names.linear_attention;
    if (table == &models::kMambaSection) return names.mamba;
    if (table == &models::kMoeSection) return names.moe_mlp;
    return table == &models::kGatedMlpSection ? names.dense_mlp : names.attention;
  }

  // `sections`: attention and feed-forward, or the one module of the layer.
  void add_layer(const std::vector<Section>& sections, const std::string& hf) {
    for (const auto& section : sections) {
      const auto names = names_of(*map_.family->names, section.table);
      require(!names.empty(), ErrorKind::kLayout, "{}: the family {} has no layers {} experts", hf,
              map_.family->model_type, section.table == &models::kMoeSection ? "with" : "without");
      add({section}, names, hf);
    }
    for (const auto& section : sections) add_states(section);
  }

  void add_prediction_layer(std::int64_t index) {
    const auto& names = *map_.family->names;
    require(!names.prediction.empty(), ErrorKind::kLayout, "the family {} has no prediction layers",
            map_.family->model_type);
    const auto& config = map_.config;
    const auto sections = models::prediction_sections(config, index);
    // Hugging Face counts the layers of all prediction layers of a hybrid model together: the first
    // of one holds its norms and projection, the last its last norm.
    const auto wrapped = config.is_hybrid_model() ? std::ssize(sections) - 2 : 1;
    const auto hf = names.prediction_own.empty()
                        ? fill_in(names.layer, kLayerMark, config.num_layers + index)
                        : fill_in(names.prediction_own, kLayerMark, index * wrapped);
    add({sections.front()}, names.prediction, hf);
    add({sections.back()}, names.prediction,
        names.prediction_own.empty()
            ? hf
            : fill_in(names.prediction_own, kLayerMark, (index + 1) * wrapped - 1));
    add_states(sections.front());
    for (const auto& copy : names.prediction_copies) {
      // A tied head is the embedding.
      const auto of = map_.index.find(std::string(copy.of));
      map_.copies.emplace(fmt::format("{}{}", hf, copy.hf),
                          of != map_.index.end() ? of->second : embedding());
    }
    if (config.is_hybrid_model()) {
      for (std::int64_t i = 0; i < wrapped; ++i) {
        add_layer({sections[static_cast<std::size_t>(i + 1)]},
                  fill_in(names.prediction_layer, kLayerMark, index * wrapped + i));
      }
      return;
    }
    add_layer({sections[1], sections[2]}, names.prediction_own.empty()
                                              ? hf
                                              : fill_in(names.prediction_layer, kLayerMark, index));
  }

  // The parameters of the sections, in the order of `names`, which name every one of them.
  void add(const std::vector<Section>& sections,
           std::span<const HfName> names,
           const std::string& hf) {
    std::size_t found = 0;
    const auto applies = [&](const Section& section, models::When when) {
      const auto sizes = models::layer_sizes(section, map_.config);
      return when(sizes ? *sizes : map_.config);
    };
    for (const auto& name : names) {
      for (const auto& section : sections) {
        const auto* const row = row_of(*section.table, name);
        if (row == nullptr || !applies(section, row->when)) continue;
        const auto parameters = expand_braces(name.parameter);
        found += parameters.size();
        if (parameters.size() > 1) {
          add_together(section, parameters, name, hf);
          continue;
        }
        auto used = name;
        bool chosen = false;
        if (!name.alternative.empty() && find_ &&
            find_(fmt::format("{}{}", hf, expand_braces(name.alternative).back()))) {
          used.hf = name.alternative;
          used.rest_unused = false;
          chosen = true;
        }
        if (name.either_way && lies_as_it_is(section, names, hf)) {
          used.transposed = false;
          chosen = true;
        }
        const auto first = map_.tensors.size();
        auto experts = row->per_expert ? map_.config.num_moe_experts : 1;
        if (counts_only_ && row->per_expert) {
          alike_ = used.hf.find(kExpertMark) != std::string_view::npos ? experts : 1;
          experts = std::min<std::int64_t>(experts, 1);
        }
        for (std::int64_t e = 0; e < experts; ++e)
          add_parameter(section, *row, used, hf, row->per_expert ? std::optional(e) : std::nullopt);
        alike_ = 1;
        for (auto i = first; chosen && i < map_.tensors.size(); ++i)
          map_.chosen.emplace(map_.tensors[i].name, map_.tensors[i].shape);
      }
    }
    for (const auto& section : sections) {
      found -= static_cast<std::size_t>(std::ranges::count_if(
          section.table->rows, [&](auto& row) { return applies(section, row.when); }));
    }
    require(found == 0, ErrorKind::kLayout,
            "the family {} names no tensors for some parameters that its configuration asks for",
            map_.family->model_type);
  }

  // True if one of the tensors that may lie either way does not lie transposed. All of a layer lie
  // alike, and one of them may be as wide as it is high.
  bool lies_as_it_is(const Section& section,
                     std::span<const HfName> names,
                     const std::string& hf) const {
    return std::ranges::any_of(names, [&](const HfName& name) {
      const auto* const row = row_of(*section.table, name);
      if (!name.either_way || row == nullptr || !find_) return false;
      const auto found = find_(fmt::format("{}{}", hf, name.hf));
      const auto parameter = models::make_parameter(section, *row, map_.config, 0).shape;
      HfShape lies{.stacked = true, .transposed = true};
      const auto num_experts = map_.config.num_moe_experts;
      if (!found || *found == lies.of(parameter, num_experts)) return false;
      lies.transposed = false;
      return *found == lies.of(parameter, num_experts);
    });
  }

  // Several parameters that lie in one tensor.
  void add_together(const Section& section,
                    const std::vector<std::string>& parameters,
                    const HfName& name,
                    const std::string& hf) {
    std::vector<MegatronTensor> tensors;
    std::int64_t rows = 0;
    for (const auto& parameter : parameters) {
      const auto* const row = row_of(*section.table, {.parameter = parameter, .hf = name.hf});
      require(row != nullptr, ErrorKind::kBug, "{}: no parameter {}", name.hf, parameter);
      tensors.push_back({models::make_parameter(section, *row, map_.config, std::nullopt), {}});
      rows += tensors.back().shape[0];
    }
    auto shape = tensors.front().shape;
    shape[0] = rows;
    const auto model = add_model(fmt::format("{}{}", hf, name.hf), shape);
    const auto groups = name.groups(map_.config);
    std::int64_t from = 0;
    for (std::int64_t group = 0; group < groups; ++group) {
      for (auto& tensor : tensors) {
        const auto count = tensor.shape[0] / groups;
        tensor.parts.push_back({.model = model,
                                .model_box = rows_of(shape, from, count),
                                .box = rows_of(tensor.shape, group * count, count)});
        from += count;
      }
    }
    std::ranges::move(tensors, std::back_inserter(map_.megatron));
  }

  void add_parameter(const Section& section,
                     const ParameterRow& row,
                     const HfName& name,
                     const std::string& hf,
                     std::optional<std::int64_t> expert) {
    MegatronTensor tensor{models::make_parameter(section, row, map_.config, expert)};
    const auto sizes = models::layer_sizes(section, map_.config);
    const auto& config = sizes ? *sizes : map_.config;
    const auto rows = models::merged_rows(row, config);
    if (name.rest_unused) return add_first_part(std::move(tensor), config, rows.front(), hf, name);
    const auto texts = expand_braces(fill_in(name.hf, kExpertMark, expert.value_or(0)));
    const HfShape lies{.stacked = expert && name.hf.find(kExpertMark) == std::string_view::npos,
                       .merged = texts.size() == 1 && rows.size() > 1,
                       .as_row = name.as_row,
                       .transposed = name.transposed,
                       .interleaved = name.interleaved};
    require(lies.merged || texts.size() == rows.size(), ErrorKind::kBug,
            "{}: {} names for {} parts", name.hf, texts.size(), rows.size());
    std::vector<std::uint32_t> sources;
    std::vector<int> copies;  // of the source
    for (const auto& part : texts) {
      auto shape = tensor.shape;
      if (!lies.merged) shape[0] = rows[sources.size()];
      const auto repeats = std::ranges::find(texts, part) - texts.begin();
      copies.push_back(repeats < std::ssize(sources) ? 1 : 0);
      sources.push_back(copies.back() > 0 ? sources[static_cast<std::size_t>(repeats)]
                                          : add_model(hf + part, shape, lies, std::ssize(rows)));
    }
    std::int64_t at = 0;
    // Rows [from, from + count) of part i.
    const auto add_part = [&](std::size_t i, std::int64_t from, std::int64_t count) {
      if (lies.merged && !lies.interleaved)
        from = std::accumulate(rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(i), from);
      auto part = lies.part(rows_of(tensor.shape, from, count), static_cast<std::int64_t>(i),
                            expert.value_or(0));
      part.model = sources[lies.merged ? 0 : i];
      part.copy = copies[lies.merged ? 0 : i];
      part.box = rows_of(tensor.shape, at, count);
      tensor.parts.push_back(part);
      at += count;
    };
    const bool qkv = row.merge == Merge::kQkvGroups;
    const auto groups = qkv ? config.num_query_groups : 1;
    for (std::int64_t group = 0; group < groups; ++group) {
      for (std::size_t i = 0; i < rows.size(); ++i) {
        const auto count = rows[i] / groups;
        const auto from = group * count;
        if (!qkv || i > 0 || !config.attention_output_gate) {
          add_part(i, from, count);
          continue;
        }
        // Hugging Face has each query and then its gate, Megatron a group's queries and then their
        // gates.
        const auto head = config.kv_channels;
        for (const auto first : {std::int64_t{0}, head}) {
          for (auto row_of_head = first; row_of_head < count; row_of_head += 2 * head)
            add_part(i, from + row_of_head, head);
        }
      }
    }
    map_.megatron.push_back(std::move(tensor));
  }

  // A parameter of which Megatron computes with the first `rows` alone, or, of a norm, with none.
  void add_first_part(MegatronTensor tensor,
                      const TransformerConfig& config,
                      std::int64_t rows,
                      const std::string& hf,
                      const HfName& name) {
    const bool norm = tensor.merge != Merge::kQkvGroups;
    auto shape = tensor.shape;
    shape[0] = norm ? 0 : rows;
    const auto model = norm ? map_.index.at(fmt::format("{}{}", hf, name.hf))
                            : add_model(fmt::format("{}{}", hf, name.hf), shape);
    const auto groups = norm ? 1 : config.num_query_groups;
    const auto of_group = tensor.shape[0] / groups;
    const auto count = shape[0] / groups;
    for (std::int64_t group = 0; group < groups; ++group) {
      tensor.parts.push_back({.model = model,
                              .model_box = rows_of(shape, group * count, count),
                              .box = rows_of(tensor.shape, group * of_group, count)});
      tensor.unused.push_back(rows_of(tensor.shape, group * of_group + count, of_group - count));
    }
    map_.megatron.push_back(std::move(tensor));
  }

  // The tensor that holds `shape` of a parameter, one of `parts`. One of all experts is added once.
  std::uint32_t add_model(std::string name,
                          const Shape& shape,
                          const HfShape& lies = {},
                          std::int64_t parts = 1) {
    ModelTensor tensor{.name = std::move(name),
                       .shape = lies.of(shape, map_.config.num_moe_experts),
                       .interleaved = lies.interleaved ? parts : 1};
    if (lies.stacked) {
      if (const auto found = map_.index.find(tensor.name); found != map_.index.end())
        return found->second;
    }
    const auto volume = checked_volume(tensor.shape);
    constexpr std::int64_t kMaxElementBytes = 8;
    std::int64_t bytes = 0;
    require(volume && !__builtin_mul_overflow(*volume, kMaxElementBytes, &bytes) &&
                !__builtin_mul_overflow(bytes, alike_, &bytes) &&
                !__builtin_add_overflow(num_bytes_, bytes, &num_bytes_),
            ErrorKind::kLayout, "{}: has shape {} as the configuration says, which overflows",
            tensor.name, to_string(tensor.shape));
    num_elements_ += *volume * alike_;
    const auto index = static_cast<std::uint32_t>(map_.tensors.size());
    map_.index.emplace(tensor.name, index);
    map_.tensors.push_back(std::move(tensor));
    return index;
  }

  void add_states(const Section& section) {
    if (counts_only_) return;
    const bool stacked = !section.stacked.empty() && map_.config.is_homogeneous();
    for (const auto& row : section.table->extra_states) {
      if (!row.when(map_.config)) continue;
      for (std::int64_t e = 0; e < (row.per_expert ? map_.config.num_moe_experts : 1); ++e) {
        MegatronObject state{
            .object = {.key = fmt::format("{}{}._extra_state",
                                          stacked ? section.stacked : section.prefix, row.module)},
            .stage = section.stage,
            .layer = section.layer,
            .expert = row.per_expert ? std::optional(e) : std::nullopt};
        auto& object = state.object;
        if (stacked) {
          object.global_shape.push_back(section.stack_size);
          object.global_offset.push_back(section.stack_index);
        }
        if (row.per_expert) {
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

  const FindTensor& find_;
  ModelMap map_;
  bool counts_only_ = false;  // one expert of each layer alone
  std::int64_t alike_ = 1;    // tensors of which the one that is added is an example
  std::int64_t num_elements_ = 0;
  std::int64_t num_bytes_ = 0;  // at most: so that no sum of sizes overflows later
};

bool begins_with_one(std::span<const std::string_view> prefixes, std::string_view name) {
  return std::ranges::any_of(prefixes, [&](auto prefix) { return name.starts_with(prefix); });
}

}  // namespace

const std::string& ModelMap::written_key(const MegatronTensor& tensor) const {
  return !tensor.stacked_key.empty() && config.is_homogeneous() ? tensor.stacked_key : tensor.key;
}

bool ModelMap::is_tower() const {
  return !megatron.empty() && megatron.front().key.starts_with(models::kVisionModel);
}

bool ModelMap::is_carried(std::string_view hf_name) const {
  return begins_with_one(family->names->carried, hf_name) ||
         begins_with_one(family->prediction.carried, hf_name);
}

std::string ModelMap::describe(const MegatronTensor& tensor) const {
  return tensor.expert ? fmt::format("{} of expert {}", tensor.key, *tensor.expert) : tensor.key;
}

Box rows_of(const Shape& shape, std::int64_t from, std::int64_t count) {
  Box box = Box::whole(shape);
  box.offset[0] = from;
  box.size[0] = count;
  return box;
}

ModelMap make_model_map(const TransformerConfig& config, const FindTensor& find) {
  return Builder(config, find).build();
}

std::int64_t count_parameters(const TransformerConfig& config) {
  return Builder(config, {}).count();
}

ModelMap make_vision_map(const TransformerConfig& config) {
  return Builder(config, {}).build_vision();
}

bool is_prediction_tensor(const TransformerConfig& config, std::string_view hf_name) {
  const auto& family = family_of(config.family);
  const auto& names = *family.names;
  if (begins_with_one(family.prediction.carried, hf_name)) return true;
  if (!names.prediction_own.empty()) {
    const auto own = names.prediction_own.substr(0, names.prediction_own.find(kLayerMark));
    return config.mtp_num_layers > 0 && hf_name.starts_with(own);
  }
  const auto pattern = names.layer;
  for (std::int64_t j = 0; j < config.mtp_num_layers; ++j) {
    if (hf_name.starts_with(fill_in(pattern, kLayerMark, config.num_layers + j))) return true;
  }
  return false;
}

}  // namespace ferry::converter
