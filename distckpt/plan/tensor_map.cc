#include "distckpt/plan/tensor_map.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "distckpt/base/error.h"

namespace ferry::distckpt {
namespace {

// After the tensor that it pads, so that it does not depend on the stored tensor's key, unless that
// holds nothing else.
std::string padding_name(const std::vector<ModelTensor>& tensors,
                         const Layout& layout,
                         const TensorMap& map,
                         const PaddingBox& padding) {
  const auto link = std::ranges::find(map.links, padding.stored, &BoxLink::stored);
  return fmt::format(
      "{} {} (padding)",
      link != map.links.end() ? tensors.at(link->model).name : layout.tensor(padding.stored).name,
      to_string(padding.box));
}

}  // namespace

Shape ModelTensor::grid() const {
  if (interleaved == 1) return shape;
  auto grid = shape;
  grid[grid.rank() - 1] /= interleaved;
  grid.push_back(interleaved);
  return grid;
}

std::set<std::string> padding_names(const std::vector<ModelTensor>& tensors,
                                    const Layout& layout,
                                    const TensorMap& map) {
  std::set<std::string> names;
  for (const auto& padding : map.padding) names.insert(padding_name(tensors, layout, map, padding));
  return names;
}

void promote_padding(const std::set<std::string>& names,
                     const Layout& layout,
                     TensorMap& map,
                     std::vector<ModelTensor>& tensors) {
  std::map<std::string, PaddingBox> found;
  std::erase_if(map.padding, [&](const PaddingBox& padding) {
    auto name = padding_name(tensors, layout, map, padding);
    return names.contains(name) && found.emplace(std::move(name), padding).second;
  });
  for (const auto& [name, padding] : found) {
    map.links.push_back({.model = static_cast<std::uint32_t>(tensors.size()),
                         .model_box = Box::whole(padding.box.size),
                         .stored = padding.stored,
                         .stored_box = padding.box});
    tensors.push_back({.name = name,
                       .dtype = layout.tensor(padding.stored).dtype,
                       .shape = padding.box.size,
                       .role = Role::kPadding});
  }
}

std::set<std::string> promote_shared_padding(const Layout& source_layout,
                                             TensorMap& source,
                                             const Layout& target_layout,
                                             TensorMap& target,
                                             std::vector<ModelTensor>& tensors) {
  auto shared = padding_names(tensors, source_layout, source);
  const auto of_target = padding_names(tensors, target_layout, target);
  std::erase_if(shared, [&](const std::string& name) { return !of_target.contains(name); });
  auto as_target = tensors;
  promote_padding(shared, target_layout, target, as_target);
  promote_padding(shared, source_layout, source, tensors);
  return shared;
}

void restrict_links(TensorMap& map,
                    const Layout& layout,
                    const std::vector<std::optional<std::uint32_t>>& at) {
  TensorMap kept{.left_out = std::move(map.left_out)};
  std::set<std::uint32_t> stored;  // tensors that hold something which is kept
  const auto leave_whole = [&](std::uint32_t index) {
    kept.left_out.push_back({.stored = index, .box = Box::whole(layout.tensor(index).shape)});
  };
  for (auto& link : map.links) {
    const auto* scale =
        link.scale < 0 ? nullptr : &map.scales[static_cast<std::size_t>(link.scale)];
    if (!at[link.model]) {
      kept.left_out.push_back({.stored = link.stored, .box = link.stored_box});
      if (scale != nullptr) leave_whole(scale->stored);
      if (scale != nullptr && scale->how != GlobalScale::kNone) leave_whole(scale->global);
      continue;
    }
    stored.insert(link.stored);
    link.model = *at[link.model];
    if (scale != nullptr) {
      link.scale = static_cast<int>(kept.scales.size());
      kept.scales.push_back(*scale);
    }
    kept.links.push_back(link);
  }
  for (const auto& padding : map.padding) {
    auto& list = stored.contains(padding.stored) ? kept.padding : kept.left_out;
    list.push_back(padding);
  }
  map = std::move(kept);
}

}  // namespace ferry::distckpt
