#include "converter/write/separate_experts.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "converter/families/model_map.h"
#include "converter/stored/part.h"
#include "distckpt/base/error.h"

namespace ferry::converter {
namespace {

using distckpt::Box;
using distckpt::BoxLink;
using distckpt::ModelTensor;
using distckpt::Shape;

// A box of a tensor of all experts, and the box of a tensor of one that it is.
struct ExpertPart {
  Box together{};
  std::uint32_t model = 0;  // index in the map with experts apart
  Box apart{};
};
using ExpertParts = std::multimap<std::uint32_t, ExpertPart>;  // by the index of the first tensor

// The map in which experts lie apart, as far as the family has names for it.
ModelMap map_apart(const ModelMap& map) {
  return make_model_map(map.config, [&](const std::string& name) -> std::optional<Shape> {
    const auto found = map.index.find(name);
    if (found == map.index.end()) return std::nullopt;
    const auto& shape = map.tensors[found->second].shape;
    return map.chosen.contains(name) && shape.rank() == 3 ? std::nullopt : std::optional(shape);
  });
}

// The parts of the tensors of `map` that `apart` does not have.
ExpertParts parts_apart(const ModelMap& map, const ModelMap& apart) {
  std::map<std::pair<std::string, std::int64_t>, const MegatronTensor*> experts;
  for (const auto& tensor : map.megatron) {
    if (tensor.expert) experts.emplace(std::pair(tensor.key, *tensor.expert), &tensor);
  }
  ExpertParts parts;
  for (const auto& tensor : apart.megatron) {
    if (!tensor.expert) continue;
    const auto found = experts.find({tensor.key, *tensor.expert});
    if (found == experts.end()) continue;  // of a layer that is not selected
    for (const auto& from : found->second->parts) {
      if (apart.index.contains(map.tensors[from.model].name)) continue;
      for (const auto& to : tensor.parts) {
        const auto shared = intersect(from.box, to.box);
        if (!shared) continue;
        require(from.axes.empty() && to.axes.empty(), ErrorKind::kBug,
                "{}: experts that lie transposed have no names apart", tensor.key);
        parts.emplace(from.model,
                      ExpertPart{.together = translate(*shared, from.box, from.model_box),
                                 .model = to.model,
                                 .apart = translate(*shared, to.box, to.model_box)});
      }
    }
  }
  return parts;
}

// The part of a link that is a part of one expert, if there is one.
std::optional<BoxLink> link_apart(const BoxLink& link, const ExpertPart& part, std::uint32_t at) {
  const auto shared = intersect(link.model_box, part.together);
  if (!shared) return std::nullopt;
  auto of_expert = link;
  of_expert.model = at;
  of_expert.model_box = translate(*shared, part.together, part.apart);
  of_expert.stored_box = translate(*shared, link.model_box, link.stored_box);
  return of_expert;
}

}  // namespace

void separate_experts(Checkpoint& checkpoint, std::vector<ModelTensor>& tensors) {
  const auto& map = checkpoint.map;
  auto apart = map_apart(map);
  const auto parts = parts_apart(map, apart);
  if (parts.empty()) return;

  std::vector<const ModelTensor*> known(apart.tensors.size());  // a tensor of the same dtype
  for (std::uint32_t i = 0; i < apart.tensors.size(); ++i) {
    const auto found = map.index.find(apart.tensors[i].name);
    if (found != map.index.end()) known[i] = &tensors[found->second];
  }
  for (const auto& [together, part] : parts) known[part.model] = &tensors[together];
  std::vector<std::optional<std::uint32_t>> at;
  std::vector<ModelTensor> kept;
  for (std::uint32_t i = 0; i < apart.tensors.size(); ++i) {
    at.push_back(known[i] ? std::optional(static_cast<std::uint32_t>(kept.size())) : std::nullopt);
    if (!known[i]) continue;
    kept.push_back(apart.tensors[i]);
    kept.back().dtype = known[i]->dtype;
  }

  std::vector<BoxLink> links;
  const auto beside = static_cast<std::uint32_t>(map.tensors.size());  // derived ones, a tower
  for (auto& link : checkpoint.links.links) {
    const auto [first, last] = parts.equal_range(link.model);
    if (first == last) {
      link.model = link.model < beside
                       ? *at[apart.index.at(map.tensors[link.model].name)]
                       : link.model - beside + static_cast<std::uint32_t>(kept.size());
      links.push_back(std::move(link));
      continue;
    }
    require(link.scale < 0 && link.axes.empty() && !link.flat, ErrorKind::kLayout,
            "{}: experts that the source holds {} in one tensor are not taken apart",
            map.tensors[link.model].name, link.scale < 0 ? "in parts that are no boxes" : "in FP8");
    for (auto part = first; part != last; ++part) {
      if (auto found = link_apart(link, part->second, *at[part->second.model]))
        links.push_back(std::move(*found));
    }
  }
  checkpoint.links.links = std::move(links);
  kept.insert(kept.end(), tensors.begin() + beside, tensors.end());
  tensors = std::move(kept);
  checkpoint.tensors = tensors;
  keep_tensors(apart, at);
  checkpoint.map = std::move(apart);
}

}  // namespace ferry::converter
