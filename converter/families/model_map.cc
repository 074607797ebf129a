#include "converter/families/model_map.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "distckpt/base/error.h"

namespace ferry::converter {
namespace {

using distckpt::Box;
using distckpt::ModelTensor;
using distckpt::Shape;
using models::ParameterRow;
using models::Section;
using models::TransformerConfig;

// `text` with the mark replaced by a number; as it is where it has no mark.
std::string fill_in(std::string_view text, std::string_view mark, std::int64_t number) {
  const auto at = text.find(mark);
  if (at == std::string_view::npos) return std::string(text);
  return fmt::format("{}{}{}", text.substr(0, at), number, text.substr(at + mark.size()));
}

constexpr std::string_view kLayerMark = "{l}";
constexpr std::string_view kExpertMark = "{e}";

// Rows [from, from + count) of a tensor of that shape.
Box rows_of(const Shape& shape, std::int64_t from, std::int64_t count) {
  Box box = Box::whole(shape);
  box.offset[0] = from;
  box.size[0] = count;
  return box;
}

class Builder {
 public:
  Builder(const TransformerConfig& config, const HasTensor& has) : has_(has) {
    map_.config = config;
    map_.family = &find_family(config.family);
  }

  ModelMap build() {
    const auto& config = map_.config;
    const auto& names = *map_.family->names;
    const Section first{.stage = Stage::kFirst, .table = &models::kEmbeddingSection};
    const Section last{.stage = Stage::kLast, .table = &models::kHeadSection};
    add({first}, names.first, "");
    for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
      add_layer(models::layer_sections(config, layer), config.is_moe_layer(layer),
                fill_in(names.layer, kLayerMark, layer));
    }
    add({last}, names.last, "");
    for (std::int64_t j = 0; j < config.mtp_num_layers; ++j) add_prediction_layer(j);
    add_states(last);
    if (config.is_tied()) map_.copies.emplace(tied_head(names), embedding());
    return std::move(map_);
  }

 private:
  // The index of the embedding's tensor.
  std::uint32_t embedding() const {
    return map_.index.at(std::string(map_.family->names->embedding()));
  }

  static std::string tied_head(const HfNames& names) {
    const auto head = std::ranges::find(names.last, models::When::kUntied, &HfName::when);
    require(head != names.last.end(), ErrorKind::kBug, "a family without an output layer");
    return std::string(head->hf);
  }

  // `sections`: attention and feed-forward.
  void add_layer(const std::vector<Section>& sections, bool moe, const std::string& hf) {
    const auto& names = *map_.family->names;
    const auto& mlp = moe ? names.moe_mlp : names.dense_mlp;
    require(!mlp.empty(), ErrorKind::kLayout, "{}: the family {} has no layers {} experts", hf,
            map_.family->model_type, moe ? "with" : "without");
    const bool linear = sections[0].table == &models::kGatedDeltaNetSection;
    add({sections[0]}, linear ? names.linear_attention : names.attention, hf);
    add({sections[1]}, mlp, hf);
    for (const auto& section : sections) add_states(section);
  }

  void add_prediction_layer(std::int64_t index) {
    const auto& names = *map_.family->names;
    require(!names.prediction.empty(), ErrorKind::kLayout, "the family {} has no prediction layers",
            map_.family->model_type);
    const auto& config = map_.config;
    const auto sections = models::prediction_sections(config, index);
    const auto hf = names.prediction_own.empty()
                        ? fill_in(names.layer, kLayerMark, config.num_layers + index)
                        : std::string(names.prediction_own);
    add({sections.front(), sections.back()}, names.prediction, hf);
    add_states(sections.front());
    for (const auto& copy : names.prediction_copies) {
      // A tied head is the embedding.
      const auto of = map_.index.find(std::string(copy.of));
      map_.copies.emplace(fmt::format("{}{}", hf, copy.hf),
                          of != map_.index.end() ? of->second : embedding());
    }
    add_layer(
        {sections[1], sections[2]}, config.num_moe_experts > 0,
        names.prediction_own.empty() ? hf : fill_in(names.prediction_layer, kLayerMark, index));
  }

  // The parameters of the sections, in the order of `names`, which name every one of them.
  void add(const std::vector<Section>& sections,
           std::span<const HfName> names,
           const std::string& hf) {
    std::size_t found = 0;
    for (const auto& name : names) {
      for (const auto& section : sections) {
        const auto* const row = row_of(*section.table, name);
        if (row == nullptr || !models::applies(row->when, map_.config)) continue;
        const auto parameters = expand_braces(name.parameter);
        found += parameters.size();
        if (parameters.size() > 1) {
          add_together(section, parameters, name, hf);
          continue;
        }
        const auto packed = fmt::format("{}{}", hf, name.packed);
        if (!name.packed.empty() && has_ && has_(packed)) {
          add_packed(section, *row, packed);
          continue;
        }
        const auto experts = row->per_expert ? map_.config.num_moe_experts : 1;
        for (std::int64_t e = 0; e < experts; ++e)
          add_parameter(section, *row, name, hf, row->per_expert ? std::optional(e) : std::nullopt);
      }
    }
    for (const auto& section : sections) {
      found -= static_cast<std::size_t>(std::ranges::count_if(
          section.table->rows, [&](auto& row) { return models::applies(row.when, map_.config); }));
    }
    require(found == 0, ErrorKind::kLayout,
            "the family {} names no tensors for some parameters that its configuration asks for",
            map_.family->model_type);
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
    const auto groups = models::size_of(name.groups, map_.config);
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

  // A parameter of all experts in one tensor. Gate and up may be stored apart in Megatron.
  void add_packed(const Section& section, const ParameterRow& row, const std::string& hf) {
    const auto rows = models::merged_rows(row, map_.config);
    std::uint32_t model = 0;
    for (std::int64_t e = 0; e < map_.config.num_moe_experts; ++e) {
      MegatronTensor tensor{models::make_parameter(section, row, map_.config, e)};
      if (e == 0) {
        auto shape = tensor.shape;
        shape.push_front(map_.config.num_moe_experts);
        model = add_model(hf, shape);
      }
      std::int64_t at = 0;
      for (const auto count : rows) {
        const auto box = rows_of(tensor.shape, at, count);
        auto model_box = box;
        model_box.offset.push_front(e);
        model_box.size.push_front(1);
        tensor.parts.push_back({.model = model, .model_box = model_box, .box = box});
        at += count;
      }
      map_.megatron.push_back(std::move(tensor));
    }
  }

  void add_parameter(const Section& section,
                     const ParameterRow& row,
                     const HfName& name,
                     const std::string& hf,
                     std::optional<std::int64_t> expert) {
    MegatronTensor tensor{models::make_parameter(section, row, map_.config, expert)};
    const auto rows = models::merged_rows(row, map_.config);
    const auto parts = expand_braces(fill_in(name.hf, kExpertMark, expert.value_or(0)));
    const bool one = parts.size() == 1;  // one tensor, in which the parts lie above each other
    require(one || parts.size() == rows.size(), ErrorKind::kBug, "{}: {} names for {} parts",
            name.hf, parts.size(), rows.size());
    struct Source {
      std::uint32_t model = 0;
      std::int64_t first = 0;  // row
    };
    std::vector<Source> sources;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (one && i > 0) {
        sources.push_back({sources[i - 1].model, sources[i - 1].first + rows[i - 1]});
        continue;
      }
      auto shape = tensor.shape;
      if (!one) shape[0] = rows[i];
      if (name.as_row) shape = {1, shape[0]};
      sources.push_back({add_model(hf + parts[i], shape), 0});
    }
    std::int64_t at = 0;
    const auto add_part = [&](std::uint32_t model, std::int64_t from, std::int64_t count) {
      const auto& shape = map_.tensors[model].shape;
      tensor.parts.push_back(
          {.model = model,
           .model_box = name.as_row ? Box::whole(shape) : rows_of(shape, from, count),
           .box = rows_of(tensor.shape, at, count)});
      at += count;
    };
    const bool qkv = row.merge == Merge::kQkvGroups;
    const auto groups = qkv ? map_.config.num_query_groups : 1;
    for (std::int64_t group = 0; group < groups; ++group) {
      for (std::size_t i = 0; i < sources.size(); ++i) {
        const auto count = rows[i] / groups;
        if (!qkv || i > 0 || !map_.config.attention_output_gate) {
          add_part(sources[i].model, sources[i].first + group * count, count);
          continue;
        }
        // Hugging Face has each query and then its gate, Megatron a group's queries and then their
        // gates.
        const auto head = map_.config.kv_channels;
        for (const auto first : {std::int64_t{0}, head}) {
          for (auto row_of_head = first; row_of_head < count; row_of_head += 2 * head)
            add_part(sources[i].model, sources[i].first + group * count + row_of_head, head);
        }
      }
    }
    map_.megatron.push_back(std::move(tensor));
  }

  std::uint32_t add_model(std::string name, const Shape& shape) {
    ModelTensor tensor{.name = std::move(name), .shape = shape};
    const auto volume = checked_volume(tensor.shape);
    constexpr std::int64_t kMaxElementBytes = 8;
    std::int64_t bytes = 0;
    require(volume && !__builtin_mul_overflow(*volume, kMaxElementBytes, &bytes) &&
                !__builtin_add_overflow(num_bytes_, bytes, &num_bytes_),
            ErrorKind::kLayout, "{}: has shape {} as the configuration says, which overflows",
            tensor.name, to_string(tensor.shape));
    const auto index = static_cast<std::uint32_t>(map_.tensors.size());
    map_.index.emplace(tensor.name, index);
    map_.tensors.push_back(std::move(tensor));
    return index;
  }

  void add_states(const Section& section) {
    const bool stacked = !section.stacked.empty() && map_.config.is_homogeneous();
    for (const auto& row : section.table->extra_states) {
      if (!models::applies(row.when, map_.config)) continue;
      for (std::int64_t e = 0; e < (row.per_expert ? map_.config.num_moe_experts : 1); ++e) {
        MegatronObject state{
            .object = {.key = fmt::format("{}{}._extra_state",
                                          stacked ? section.stacked : section.prefix, row.module)},
            .stage = section.stage,
            .layer = section.layer,
            .expert = row.per_expert ? std::optional(e) : std::nullopt};
        auto& object = state.object;
        if (stacked) {
          object.global_shape.push_back(map_.config.num_layers);
          object.global_offset.push_back(*section.layer);
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

  const HasTensor& has_;
  ModelMap map_;
  std::int64_t num_bytes_ = 0;  // at most: so that no sum of sizes overflows later
};

}  // namespace

const std::string& ModelMap::written_key(const MegatronTensor& tensor) const {
  return !tensor.stacked_key.empty() && config.is_homogeneous() ? tensor.stacked_key : tensor.key;
}

bool ModelMap::is_carried(std::string_view hf_name) const {
  const auto prefix = family->names->carried;
  return !prefix.empty() && hf_name.starts_with(prefix);
}

std::string ModelMap::describe(const MegatronTensor& tensor) const {
  return tensor.expert ? fmt::format("{} of expert {}", tensor.key, *tensor.expert) : tensor.key;
}

ModelMap make_model_map(const TransformerConfig& config, const HasTensor& has) {
  return Builder(config, has).build();
}

bool is_prediction_tensor(const TransformerConfig& config, std::string_view hf_name) {
  const auto& names = *find_family(config.family).names;
  if (!names.prediction_own.empty())
    return config.mtp_num_layers > 0 && hf_name.starts_with(names.prediction_own);
  const auto pattern = names.layer;
  for (std::int64_t j = 0; j < config.mtp_num_layers; ++j) {
    if (hf_name.starts_with(fill_in(pattern, kLayerMark, config.num_layers + j))) return true;
  }
  return false;
}

}  // namespace ferry::converter
