#include "converter/open/part.h"

#include <cstdint>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace ferry::converter {
namespace {

using Indices = std::vector<std::optional<std::uint32_t>>;

Indices keep_selected(std::vector<distckpt::ModelTensor>& tensors, const Part& part) {
  Indices at;
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
  const auto at = keep_selected(map.tensors, part);
  map.index.clear();
  for (std::uint32_t i = 0; i < map.tensors.size(); ++i) map.index.emplace(map.tensors[i].name, i);
  std::erase_if(map.copies, [&](const auto& copy) { return !at[copy.second]; });
  for (auto& [name, model] : map.copies) model = *at[model];
  for (auto& tensor : map.megatron) {
    std::erase_if(tensor.parts, [&](const MappedPart& one) { return !at[one.model]; });
    for (auto& one : tensor.parts) one.model = *at[one.model];
  }
  std::erase_if(map.megatron, [](const MegatronTensor& tensor) { return tensor.parts.empty(); });
}

}  // namespace

void restrict_links(distckpt::TensorMap& map,
                    const distckpt::Layout& layout,
                    const std::vector<std::optional<std::uint32_t>>& at) {
  distckpt::TensorMap kept{.left_out = std::move(map.left_out)};
  std::set<std::uint32_t> stored;  // that hold something which is kept
  const auto leave_whole = [&](std::uint32_t index) {
    kept.left_out.push_back(
        {.stored = index, .box = distckpt::Box::whole(layout.tensor(index).shape)});
  };
  for (auto& link : map.links) {
    const auto* scale =
        link.scale < 0 ? nullptr : &map.scales[static_cast<std::size_t>(link.scale)];
    if (!at[link.model]) {
      kept.left_out.push_back({.stored = link.stored, .box = link.stored_box});
      if (scale != nullptr) leave_whole(scale->stored);
      continue;
    }
    stored.insert(link.stored);
    link.model = *at[link.model];
    if (scale != nullptr) {
      link.scale = static_cast<int>(kept.scales.size());
      kept.scales.push_back(*scale);
    }
    kept.links.push_back(std::move(link));
  }
  for (auto& padding : map.padding) {
    auto& list = stored.contains(padding.stored) ? kept.padding : kept.left_out;
    list.push_back(std::move(padding));
  }
  map = std::move(kept);
}

ModelMap make_part_map(const models::TransformerConfig& config, const Part& part) {
  auto map = make_model_map(config);
  if (!part.empty()) restrict_map(map, part);
  return map;
}

void restrict_checkpoint(Checkpoint& checkpoint, const Selection& selection) {
  restrict_map(checkpoint.map, {selection});
  const auto at = keep_selected(checkpoint.tensors, {selection});
  restrict_links(checkpoint.links, checkpoint.layout, at);
  if (!checkpoint.hf) return;
  checkpoint.hf->part.push_back(selection);
  checkpoint.hf->headers.clear();
  checkpoint.hf->index_text.reset();
}

}  // namespace ferry::converter
