#include "converter/open/experts_form.h"

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
using distckpt::Dims;
using distckpt::ModelTensor;
using distckpt::Shape;

// Dimension `d` of a box, which is dimension axis_of(d) of the box that it is element for element:
// the last ones of both where no axes say it. Below zero: it counts nothing.
class Axes {
 public:
  Axes(const Dims& axes, int rank, int other_rank)
      : axes_(axes), first_(axes.empty() ? 0 : rank - axes.rank()), shift_(other_rank - rank) {}

  int operator()(int d) const {
    if (axes_.empty()) return d + shift_;
    return d < first_ ? -1 : static_cast<int>(axes_[d - first_]);
  }

 private:
  const Dims& axes_;
  int first_;
  int shift_;
};

// `part` of `from` as the part of `to` that it is.
Box translate_along(const Box& part, const Box& from, const Box& to, const Axes& axes) {
  auto found = to;
  for (int d = 0; d < part.rank(); ++d) {
    if (axes(d) < 0) continue;
    found.offset[axes(d)] += part.offset[d] - from.offset[d];
    found.size[axes(d)] = part.size[d];
  }
  return found;
}

// A box of a tensor, and the box of a tensor in the other form that it is.
struct ExpertPart {
  Box before{};
  std::uint32_t model = 0;  // index in the map of the other form
  Box after{};
  Dims axes{};  // dimensions of `after` by those of `before`
};
using ExpertParts = std::multimap<std::uint32_t, ExpertPart>;  // by the index of the first tensor

ExpertPart make_part(const Box& shared, const MappedPart& from, const MappedPart& to) {
  const Axes before(from.axes, from.box.rank(), from.model_box.rank());
  const Axes after(to.axes, to.box.rank(), to.model_box.rank());
  ExpertPart part{.before = translate_along(shared, from.box, from.model_box, before),
                  .model = to.model,
                  .after = translate_along(shared, to.box, to.model_box, after)};
  for (int d = 0; d < from.model_box.rank(); ++d) part.axes.push_back(-1);
  for (int d = 0; d < shared.rank(); ++d) {
    if (before(d) >= 0) part.axes[before(d)] = after(d);
  }
  return part;
}

// The parts of the tensors of `map` that `other` does not have so.
ExpertParts parts_in_other_form(const ModelMap& map, const ModelMap& other) {
  std::map<std::pair<std::string, std::int64_t>, const MegatronTensor*> experts;
  for (const auto& tensor : map.megatron) {
    if (tensor.expert) experts.emplace(std::pair(tensor.key, *tensor.expert), &tensor);
  }
  ExpertParts parts;
  for (const auto& tensor : other.megatron) {
    if (!tensor.expert) continue;
    const auto found = experts.find({tensor.key, *tensor.expert});
    if (found == experts.end()) continue;  // of a layer that is not selected
    for (const auto& from : found->second->parts) {
      const auto& before = map.tensors[from.model];
      const auto same = other.index.find(before.name);
      if (same != other.index.end() && other.tensors[same->second].shape == before.shape) continue;
      for (const auto& to : tensor.parts) {
        if (const auto shared = intersect(from.box, to.box))
          parts.emplace(from.model, make_part(*shared, from, to));
      }
    }
  }
  return parts;
}

// True if elements in row-major order stay in it.
bool is_in_order(const Dims& axes) {
  std::int64_t last = -1;
  for (const auto axis : axes) {
    if (axis < 0) continue;
    if (axis < last) return false;
    last = axis;
  }
  return true;
}

// The part of a link that is a part of an expert, if there is one.
std::optional<BoxLink> link_part(const BoxLink& link,
                                 const ExpertPart& part,
                                 std::uint32_t at,
                                 const std::string& name) {
  const auto shared = intersect(link.model_box, part.before);
  if (!shared) return std::nullopt;
  const bool cut = *shared != link.model_box;
  const bool stays = !link.flat || (!cut && is_in_order(part.axes));
  require(stays && link.scale < 0, ErrorKind::kLayout,
          "{}: experts that the source holds {} are not brought into another form", name,
          link.scale < 0 ? "in parts that are no boxes" : "quantised");
  const Axes of_model(part.axes, part.before.rank(), part.after.rank());
  auto other = link;
  other.model = at;
  other.model_box = translate_along(*shared, part.before, part.after, of_model);
  const auto rank = link.stored_box.rank();
  const Axes of_stored(link.axes, rank, link.model_box.rank());
  Dims axes;  // from the last dimension on
  bool in_order = true;
  for (int d = 0; d < rank && !link.flat; ++d) {
    const auto model = of_stored(d);
    if (model < 0) continue;
    if (cut) {
      other.stored_box.offset[d] += shared->offset[model] - link.model_box.offset[model];
      other.stored_box.size[d] = shared->size[model];
    }
    const auto after = of_model(model);
    if (after < 0) continue;
    axes.push_back(after);
    in_order &= after == d + other.model_box.rank() - rank;
  }
  other.axes = in_order ? Dims() : axes;
  return other;
}

// The tensors of `map` that experts lie in.
std::map<std::string, Shape> tensors_of_experts(const ModelMap& map) {
  std::map<std::string, Shape> found;
  for (const auto& tensor : map.megatron) {
    if (!tensor.expert) continue;
    for (const auto& part : tensor.parts) {
      const auto& model = map.tensors[part.model];
      found.emplace(model.name, model.shape);
    }
  }
  return found;
}

// Gives the experts of a checkpoint the form that they have in `other`, a map of the whole model.
// False if it is the same.
bool restate_experts(ModelMap other, Checkpoint& checkpoint, std::vector<ModelTensor>& tensors) {
  const auto& map = checkpoint.map;
  const auto parts = parts_in_other_form(map, other);
  if (parts.empty()) return false;

  std::vector<const ModelTensor*> known(other.tensors.size());  // a tensor of the same dtype
  for (std::uint32_t i = 0; i < other.tensors.size(); ++i) {
    const auto found = map.index.find(other.tensors[i].name);
    if (found != map.index.end()) known[i] = &tensors[found->second];
  }
  std::vector<std::int64_t> volumes(other.tensors.size());
  for (const auto& [before, part] : parts) {
    known[part.model] = &tensors[before];
    volumes[part.model] += part.after.size.product();
  }
  std::vector<std::optional<std::uint32_t>> at;
  std::vector<ModelTensor> kept;
  for (std::uint32_t i = 0; i < other.tensors.size(); ++i) {
    const auto& tensor = other.tensors[i];
    require(volumes[i] == 0 || volumes[i] == tensor.shape.product(), ErrorKind::kLayout,
            "{}: not all of its experts are there", tensor.name);
    at.push_back(known[i] ? std::optional(static_cast<std::uint32_t>(kept.size())) : std::nullopt);
    if (!known[i]) continue;
    kept.push_back(tensor);
    kept.back().dtype = known[i]->dtype;
  }

  std::vector<BoxLink> links;
  const auto beside = static_cast<std::uint32_t>(map.tensors.size());  // derived ones, a tower
  for (const auto& link : checkpoint.links.links) {
    const auto [first, last] = parts.equal_range(link.model);
    if (first == last) {
      links.push_back(link);
      links.back().model = link.model < beside
                               ? *at[other.index.at(map.tensors[link.model].name)]
                               : link.model - beside + static_cast<std::uint32_t>(kept.size());
      continue;
    }
    for (auto part = first; part != last; ++part) {
      auto found =
          link_part(link, part->second, *at[part->second.model], map.tensors[link.model].name);
      if (found) links.push_back(*found);
    }
  }
  checkpoint.links.links = std::move(links);
  kept.insert(kept.end(), tensors.begin() + beside, tensors.end());
  tensors = std::move(kept);
  checkpoint.tensors = tensors;
  keep_tensors(other, at);
  other.trains_tower = map.trains_tower;
  checkpoint.map = std::move(other);
  return true;
}

}  // namespace

void separate_experts(Checkpoint& checkpoint, std::vector<ModelTensor>& tensors) {
  const auto& map = checkpoint.map;
  if (map.chosen.empty()) return;
  auto apart = make_model_map(map.config, [&](const std::string& name) -> std::optional<Shape> {
    const auto found = map.index.find(name);
    if (found == map.index.end()) return std::nullopt;
    const auto& shape = map.tensors[found->second].shape;
    return map.chosen.contains(name) && shape.rank() == 3 ? std::nullopt : std::optional(shape);
  });
  // Names for each there may be none.
  bool has_names = false;
  for (const auto& [name, shape] : tensors_of_experts(map))
    has_names |= !apart.index.contains(name);
  if (has_names) restate_experts(std::move(apart), checkpoint, tensors);
}

bool take_experts_form(const ModelMap& like, Checkpoint& checkpoint) {
  const auto experts = tensors_of_experts(like);
  const auto& map = checkpoint.map;
  const auto mine = tensors_of_experts(map);
  if (experts == mine) return false;
  auto other = make_model_map(map.config, [&](const std::string& name) -> std::optional<Shape> {
    if (const auto found = experts.find(name); found != experts.end()) return found->second;
    const auto found = map.index.find(name);
    if (found == map.index.end() || mine.contains(name)) return std::nullopt;
    return map.tensors[found->second].shape;
  });
  return restate_experts(std::move(other), checkpoint, checkpoint.tensors);
}

}  // namespace ferry::converter
