#include "distckpt/plan/tensor_map.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "distckpt/base/error.h"

namespace ferry::distckpt {
namespace {

// After the tensor that it pads, so that it does not depend on the stored tensor's key.
std::string padding_name(const std::vector<ModelTensor>& tensors,
                         const TensorMap& map,
                         const PaddingBox& padding) {
  const auto link = std::ranges::find(map.links, padding.stored, &BoxLink::stored);
  require(link != map.links.end(), ErrorKind::kBug, "padding of a tensor that holds nothing else");
  return fmt::format("{} {} (padding)", tensors.at(link->model).name, to_string(padding.box));
}

}  // namespace

std::set<std::string> padding_names(const std::vector<ModelTensor>& tensors, const TensorMap& map) {
  std::set<std::string> names;
  for (const auto& padding : map.padding) names.insert(padding_name(tensors, map, padding));
  return names;
}

void promote_padding(const std::set<std::string>& names,
                     const Layout& layout,
                     TensorMap& map,
                     std::vector<ModelTensor>& tensors) {
  std::map<std::string, PaddingBox> found;
  std::erase_if(map.padding, [&](const PaddingBox& padding) {
    auto name = padding_name(tensors, map, padding);
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
  auto shared = padding_names(tensors, source);
  const auto of_target = padding_names(tensors, target);
  std::erase_if(shared, [&](const std::string& name) { return !of_target.contains(name); });
  auto as_target = tensors;
  promote_padding(shared, target_layout, target, as_target);
  promote_padding(shared, source_layout, source, tensors);
  return shared;
}

}  // namespace ferry::distckpt
