#include "converter/stored/part.h"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <utility>

#include "converter/families/quantization.h"
#include "distckpt/base/error.h"
#include "distckpt/base/json.h"

namespace ferry::converter {
namespace {

using distckpt::ModelTensor;
using nlohmann::json;

constexpr std::string_view kPartFormat = "ferry-part-1";

// The name that globs are held against.
std::string selectable_name(const ModelTensor& tensor) {
  const auto& name = tensor.name;
  if (tensor.role == distckpt::Role::kPadding) return name.substr(0, name.find(' '));
  return quantized_weight(name);
}

std::vector<std::string> parse_globs(const json& selection,
                                     std::string_view key,
                                     std::string_view source) {
  const auto& list = distckpt::json_at(selection, key, source);
  require(list.is_array(), ErrorKind::kCorrupt, "{}: {} is not a list", source, key);
  std::vector<std::string> globs;
  for (const auto& glob : list) globs.push_back(distckpt::json_string(glob, key, source));
  return globs;
}

}  // namespace

bool matches(std::string_view pattern, std::string_view name) {
  return fnmatch(std::string(pattern).c_str(), std::string(name).c_str(), 0) == 0;
}

bool Selection::selects(std::string_view name) const {
  const auto matched = [&](const std::string& pattern) { return matches(pattern, name); };
  return (include.empty() || std::ranges::any_of(include, matched)) &&
         std::ranges::none_of(exclude, matched);
}

bool Selection::selects(const ModelTensor& tensor) const {
  return selects(selectable_name(tensor));
}

void Selection::require_matches(const std::vector<ModelTensor>& tensors) const {
  const auto look = [&](std::string_view flag, const std::vector<std::string>& patterns) {
    for (const auto& pattern : patterns) {
      const auto matched = [&](const ModelTensor& tensor) {
        return matches(pattern, selectable_name(tensor));
      };
      if (std::ranges::any_of(tensors, matched)) continue;
      throw Error(ErrorKind::kUsage, fmt::format("{} '{}': matches no tensor", flag, pattern),
                  tensors.empty() ? "" : fmt::format("a name is {}", tensors.front().name));
    }
  };
  look("--include", include);
  look("--exclude", exclude);
  const auto selected = [&](const ModelTensor& tensor) { return selects(tensor); };
  require(std::ranges::any_of(tensors, selected), ErrorKind::kUsage, "{}: no tensor is left",
          describe());
}

std::string Selection::describe() const {
  std::string text;
  const auto add = [&](std::string_view flag, const std::vector<std::string>& patterns) {
    for (const auto& pattern : patterns) {
      text += fmt::format("{}{} '{}'", text.empty() ? "" : " ", flag, pattern);
    }
  };
  add("--include", include);
  add("--exclude", exclude);
  return text;
}

bool selects(const Part& part, const ModelTensor& tensor) {
  return std::ranges::all_of(part, [&](const Selection& one) { return one.selects(tensor); });
}

std::string describe(const Part& part) {
  std::string text;
  for (const auto& selection : part)
    text += fmt::format("{}{}", text.empty() ? "" : ", of that ", selection.describe());
  return text;
}

json part_json(const Part& part) {
  auto list = json::array();
  for (const auto& selection : part)
    list.push_back({{"include", selection.include}, {"exclude", selection.exclude}});
  return list;
}

Part parse_part_json(const json& list, std::string_view source) {
  require(list.is_array() && !list.empty(), ErrorKind::kCorrupt,
          "{}: the selections are not a list of some", source);
  Part part;
  for (const auto& selection : list) {
    part.push_back({.include = parse_globs(selection, "include", source),
                    .exclude = parse_globs(selection, "exclude", source)});
  }
  return part;
}

std::string write_part(const Part& part) {
  const json record{{"format", kPartFormat}, {"selections", part_json(part)}};
  return record.dump(1) + "\n";
}

Part parse_part(std::string_view text, std::string_view source) {
  const auto record = distckpt::parse_json(text, source);
  distckpt::require_json_format(record, kPartFormat, source);
  return parse_part_json(distckpt::json_at(record, "selections", source), source);
}

std::vector<std::optional<std::uint32_t>> keep_selected(std::vector<distckpt::ModelTensor>& tensors,
                                                        const Part& part) {
  std::vector<std::optional<std::uint32_t>> at;
  std::vector<distckpt::ModelTensor> kept;
  for (auto& tensor : tensors) {
    at.emplace_back();
    if (!selects(part, tensor)) continue;
    at.back() = static_cast<std::uint32_t>(kept.size());
    kept.push_back(std::move(tensor));
  }
  tensors = std::move(kept);
  return at;
}

void restrict_map(ModelMap& map, const Part& part) {
  auto tensors = map.tensors;
  keep_tensors(map, keep_selected(tensors, part));
  // Copies that files hold of a tensor have names of their own.
  std::erase_if(map.copies, [&](const auto& copy) {
    return !std::ranges::all_of(part,
                                [&](const Selection& one) { return one.selects(copy.first); });
  });
}

void keep_tensors(ModelMap& map, const std::vector<std::optional<std::uint32_t>>& at) {
  std::vector<ModelTensor> kept;
  for (std::size_t i = 0; i < map.tensors.size(); ++i) {
    if (at[i]) kept.push_back(std::move(map.tensors[i]));
  }
  map.tensors = std::move(kept);
  map.index.clear();
  for (std::uint32_t i = 0; i < map.tensors.size(); ++i) map.index.emplace(map.tensors[i].name, i);
  std::erase_if(map.chosen, [&](const auto& one) { return !map.index.contains(one.first); });
  std::erase_if(map.copies, [&](const auto& copy) { return !at[copy.second]; });
  for (auto& [name, model] : map.copies) model = *at[model];
  for (auto& tensor : map.megatron) {
    std::erase_if(tensor.parts, [&](const MappedPart& one) { return !at[one.model]; });
    for (auto& one : tensor.parts) one.model = *at[one.model];
  }
  std::erase_if(map.megatron, [](const MegatronTensor& tensor) { return tensor.parts.empty(); });
  // A reader of such a checkpoint sees by its tensors whether there are prediction layers.
  const auto predicts = [](std::string_view key) {
    return key.starts_with(models::kPredictionLayers);
  };
  if (std::ranges::none_of(map.megatron, predicts, &MegatronTensor::key))
    std::erase_if(map.extra_states, [&](const auto& state) { return predicts(state.object.key); });
}

ModelMap make_part_map(const models::TransformerConfig& config,
                       const Part& part,
                       const FindTensor& find) {
  auto map = make_model_map(config, find);
  if (!part.empty()) restrict_map(map, part);
  return map;
}

}  // namespace ferry::converter
