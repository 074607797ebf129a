#include "converter/adapter/factors/one_rank.h"

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/plan/box_io.h"

namespace ferry::converter {
namespace {

using distckpt::Box;
using distckpt::BoxLink;
using distckpt::DType;
using distckpt::Shape;

class Zeros : public distckpt::ComputedBytes {
 public:
  void compute(std::uint32_t /*index*/,
               distckpt::BoxSource& /*source*/,
               std::span<std::byte> into,
               std::vector<distckpt::ChecksumPart>& /*parts*/) const override {
    std::ranges::fill(into, std::byte{0});
  }
};

// A tensor of zeros: its place in the layout.
std::uint32_t add_zeros(distckpt::Layout& layout, std::string name, DType dtype, Shape shape) {
  const auto storage = layout.add_storage(distckpt::ComputedStorage{
      .size = shape.product() * size_of(dtype), .bytes = std::make_shared<const Zeros>()});
  const auto index = static_cast<std::uint32_t>(layout.tensors().size());
  layout.add_tensor({.name = std::move(name),
                     .dtype = dtype,
                     .shape = shape,
                     .shards = {distckpt::packed_shard(Box::whole(shape), dtype, storage, 0)}});
  return index;
}

Box part_along(Box box, int dim, std::int64_t from, std::int64_t count) {
  box.offset[dim] += from;
  box.size[dim] = count;
  return box;
}

}  // namespace

void raise_to_one_rank(std::span<AdaptedParameter> adapted, std::span<const float> scaling) {
  if (adapted.empty() || std::ranges::any_of(scaling, [&](float s) { return s != scaling[0]; }))
    return;
  const auto rank = std::ranges::max(adapted, {}, &AdaptedParameter::rank).rank;
  for (auto& one : adapted) one.rank = rank;
}

std::vector<AdaptedParameter> missing_modules(const ModelMap& base,
                                              std::span<const AdaptedParameter> adapted) {
  std::map<std::string, AdaptedParameter> kinds;
  std::set<std::pair<std::uint32_t, int>> there;
  const auto kind_of = [](const MegatronTensor& tensor) {
    return tensor.stacked_key.empty() ? tensor.key : tensor.stacked_key;
  };
  for (const auto& one : adapted) {
    kinds.emplace(kind_of(base.megatron[one.megatron]), one);
    there.emplace(one.megatron, one.part);
  }
  std::vector<AdaptedParameter> missing;
  for (std::uint32_t i = 0; i < base.megatron.size(); ++i) {
    const auto kind = kinds.find(kind_of(base.megatron[i]));
    if (kind == kinds.end()) continue;
    auto one = kind->second;
    one.megatron = i;
    const bool fused = one.part == AdaptedParameter::kFused;
    const auto parts = fused ? 1 : static_cast<int>(merged_tensors(base.megatron[i]).size());
    for (int part = 0; part < parts; ++part) {
      if (!fused) one.part = part;
      if (!there.contains({i, one.part})) missing.push_back(one);
    }
  }
  return missing;
}

void link_beside_zeros(Checkpoint& adapter, const BoxLink& whole, int dim, std::int64_t blocks) {
  const auto stored = adapter.layout.tensor(whole.stored);
  const auto size = whole.model_box.size[dim] / blocks;
  const auto kept = stored.shape[dim] / blocks;
  auto rest = stored.shape;
  rest[dim] = blocks * (size - kept);
  const auto zeros =
      add_zeros(adapter.layout, fmt::format("{} beside zeros", stored.name), stored.dtype, rest);
  const auto add = [&](std::uint32_t index, const Shape& shape, std::int64_t block,
                       std::int64_t from, std::int64_t count) {
    auto& link = adapter.links.links.emplace_back(whole);
    link.stored = index;
    link.model_box = part_along(whole.model_box, dim, block * size + from, count);
    link.stored_box = part_along(Box::whole(shape), dim, block * count, count);
  };
  for (std::int64_t block = 0; block < blocks; ++block) {
    add(whole.stored, stored.shape, block, 0, kept);
    add(zeros, rest, block, kept, size - kept);
  }
}

void link_zeros(Checkpoint& adapter) {
  std::set<std::uint32_t> linked;
  for (const auto& link : adapter.links.links) linked.insert(link.model);
  for (std::uint32_t i = 0; i < adapter.tensors.size(); ++i) {
    if (linked.contains(i)) continue;
    auto& tensor = adapter.tensors[i];
    tensor.dtype = adapter.tensors[*linked.begin()].dtype;
    const auto zeros = add_zeros(adapter.layout, tensor.name, tensor.dtype, tensor.shape);
    adapter.links.links.push_back(BoxLink::whole(i, zeros, tensor.shape));
  }
}

}  // namespace ferry::converter
