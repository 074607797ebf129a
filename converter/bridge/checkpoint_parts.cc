#include "converter/bridge/checkpoint_parts.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "distckpt/base/error.h"

namespace ferry::converter {
namespace {

using distckpt::StorageId;

// The layout of a few stored tensors, with their storages alone.
class PartOfLayout {
 public:
  explicit PartOfLayout(const distckpt::Layout& whole) : whole_(whole) {}

  std::uint32_t add(std::uint32_t stored) {
    const auto [at, added] =
        tensors_.emplace(stored, static_cast<std::uint32_t>(part_.tensors().size()));
    if (!added) return at->second;
    auto tensor = whole_.tensor(stored);
    for (auto& shard : tensor.shards) shard.at.storage = add_storage(shard.at.storage);
    return part_.add_tensor(std::move(tensor));
  }

  // Stored tensors and storages of the whole, and their numbers in the part.
  const std::map<std::uint32_t, std::uint32_t>& tensors() const { return tensors_; }
  const std::map<StorageId, StorageId>& storages() const { return storages_; }

  distckpt::Layout take() { return std::move(part_); }

 private:
  StorageId add_storage(StorageId id) {
    if (const auto found = storages_.find(id); found != storages_.end()) return found->second;
    const auto& storage = whole_.storages()[id];
    require(!std::holds_alternative<distckpt::ComputedStorage>(storage), ErrorKind::kBug,
            "bytes that are computed belong to no part");
    const auto number = part_.add_storage(storage);
    storages_.emplace(id, number);
    return number;
  }

  const distckpt::Layout& whole_;
  distckpt::Layout part_;
  std::map<std::uint32_t, std::uint32_t> tensors_;
  std::map<StorageId, StorageId> storages_;
};

template <typename Items, typename Key>
std::vector<std::vector<std::uint32_t>> index_by(const Items& items, std::size_t size, Key key) {
  std::vector<std::vector<std::uint32_t>> index(size);
  for (std::uint32_t i = 0; i < items.size(); ++i) index[key(items[i])].push_back(i);
  return index;
}

}  // namespace

void CheckpointParts::make_index() const {
  const auto& whole = *whole_;
  const auto& map = whole.map;
  for (std::uint32_t i = 0; i < whole.tensors.size(); ++i)
    index_.tensors.emplace(whole.tensors[i].name, i);
  index_.megatron.resize(whole.tensors.size());
  for (std::uint32_t i = 0; i < map.megatron.size(); ++i) {
    index_.keys.emplace(single_key(map.megatron[i]), i);
    for (const auto& part : map.megatron[i].parts) {
      auto& those = index_.megatron[part.model];
      if (those.empty() || those.back() != i) those.push_back(i);
    }
  }
  const auto num_stored = whole.layout.tensors().size();
  const auto stored_of = [](const auto& one) { return one.stored; };
  index_.links = index_by(whole.links.links, whole.tensors.size(),
                          [](const distckpt::BoxLink& link) { return link.model; });
  index_.stored_links = index_by(whole.links.links, num_stored, stored_of);
  index_.padding = index_by(whole.links.padding, num_stored, stored_of);
  index_.left_out = index_by(whole.links.left_out, num_stored, stored_of);
  index_.checksums =
      index_by(whole.checksums, whole.layout.storages().size(),
               [](const distckpt::ExpectedChecksum& one) { return one.range.storage; });
}

// The tensor, and those that share parameters with it: all of each of these is known.
CheckpointParts::Indices CheckpointParts::tensors_with(const std::string& name,
                                                       Indices& megatron) const {
  std::set<std::uint32_t> tensors;
  std::set<std::uint32_t> parameters;
  Indices next;
  const auto add_parameter = [&](std::uint32_t index) {
    if (!parameters.insert(index).second) return;
    for (const auto& part : whole_->map.megatron[index].parts) next.push_back(part.model);
  };
  if (const auto tensor = index_.tensors.find(name); tensor != index_.tensors.end()) {
    next.push_back(tensor->second);
  } else if (const auto key = index_.keys.find(name); key != index_.keys.end()) {
    add_parameter(key->second);
  }
  while (!next.empty()) {
    const auto tensor = next.back();
    next.pop_back();
    if (!tensors.insert(tensor).second) continue;
    for (const auto index : index_.megatron[tensor]) add_parameter(index);
  }
  megatron.assign(parameters.begin(), parameters.end());
  return {tensors.begin(), tensors.end()};
}

std::shared_ptr<const Checkpoint> CheckpointParts::part_with(const std::string& name) const {
  std::call_once(indexed_, [&] { make_index(); });
  const auto& whole = *whole_;
  Indices parameters;
  const auto tensors = tensors_with(name, parameters);
  auto part = std::make_shared<Checkpoint>(Checkpoint{.location = whole.location,
                                                      .megatron_names = whole.megatron_names,
                                                      .megatron_layout = whole.megatron_layout,
                                                      .files = whole.files});
  part->map.config = whole.map.config;
  part->map.family = whole.map.family;
  std::map<std::uint32_t, std::uint32_t> number_of;  // of tensors
  for (const auto tensor : tensors) {
    const auto number = static_cast<std::uint32_t>(part->tensors.size());
    number_of.emplace(tensor, number);
    part->tensors.push_back(whole.tensors[tensor]);
    if (tensor >= whole.map.tensors.size()) continue;  // a derived one
    part->map.tensors.push_back(whole.map.tensors[tensor]);
    part->map.index.emplace(part->tensors.back().name, number);
  }
  for (const auto index : parameters) {
    auto& parameter = part->map.megatron.emplace_back(whole.map.megatron[index]);
    for (auto& one : parameter.parts) one.model = number_of.at(one.model);
  }

  PartOfLayout layout(whole.layout);
  std::set<std::uint32_t> stored;
  for (const auto tensor : tensors) {
    for (const auto index : index_.links[tensor]) {
      auto link = whole.links.links[index];
      stored.insert(link.stored);
      link.model = number_of.at(tensor);
      link.stored = layout.add(link.stored);
      if (link.scale >= 0) {
        auto scale = whole.links.scales[static_cast<std::size_t>(link.scale)];
        scale.stored = layout.add(scale.stored);
        if (scale.how != distckpt::GlobalScale::kNone) scale.global = layout.add(scale.global);
        link.scale = static_cast<int>(part->links.scales.size());
        part->links.scales.push_back(scale);
      }
      part->links.links.push_back(link);
    }
  }
  for (const auto index : stored) {
    const auto number = layout.tensors().at(index);
    for (const auto other : index_.stored_links[index]) {
      const auto& link = whole.links.links[other];
      if (!number_of.contains(link.model))
        part->links.left_out.push_back({.stored = number, .box = link.stored_box});
    }
    for (const auto other : index_.padding[index]) {
      part->links.padding.push_back(whole.links.padding[other]);
      part->links.padding.back().stored = number;
    }
    for (const auto other : index_.left_out[index])
      part->links.left_out.push_back({.stored = number, .box = whole.links.left_out[other].box});
  }
  for (const auto& [storage, number] : layout.storages()) {
    for (const auto index : index_.checksums[storage]) {
      auto& checksum = part->checksums.emplace_back(whole.checksums[index]);
      checksum.range.storage = number;
    }
  }
  part->layout = layout.take();
  return part;
}

}  // namespace ferry::converter
