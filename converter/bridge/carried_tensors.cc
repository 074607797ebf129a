#include "converter/bridge/carried_tensors.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "converter/families/megatron_links.h"
#include "distckpt/base/error.h"

namespace ferry::converter {

bool holds_tower(const distckpt::Layout& mesh) {
  return std::ranges::any_of(mesh.tensors(), [](const distckpt::TensorLayout& tensor) {
    return tensor.name.starts_with(models::kVisionModel);
  });
}

void add_held_tower(const models::TransformerConfig& config,
                    const distckpt::Layout& mesh,
                    std::vector<distckpt::ModelTensor>& tensors,
                    distckpt::TensorMap& links) {
  const auto tower = make_vision_map(config);
  const auto first = static_cast<std::uint32_t>(tensors.size());
  for (auto link : link_megatron(tower, mesh).links) {
    link.model += first;
    links.links.push_back(std::move(link));
  }
  tensors.insert(tensors.end(), tower.tensors.begin(), tower.tensors.end());
}

void add_carried_tensors(const Checkpoint& origin, Checkpoint& model) {
  const auto first = static_cast<distckpt::StorageId>(model.layout.storages().size());
  bool found = false;
  std::set<std::string> held;  // of a tower that is trained
  for (const auto& tensor : model.tensors) {
    if (origin.map.is_carried(tensor.name)) held.insert(tensor.name);
  }
  for (const auto& link : origin.links.links) {
    const auto& tensor = origin.tensors[link.model];
    if (!origin.map.is_carried(tensor.name) || held.contains(tensor.name)) continue;
    require(link.scale < 0, ErrorKind::kUsage,
            "{}: is quantised, and no trained model is saved beside it", tensor.name);
    auto stored = origin.layout.tensor(link.stored);
    for (auto& shard : stored.shards) shard.at.storage += first;
    auto moved = link;
    moved.model = static_cast<std::uint32_t>(model.tensors.size());
    moved.stored = model.layout.add_tensor(std::move(stored));
    model.links.links.push_back(moved);
    model.tensors.push_back(tensor);
    found = true;
  }
  if (!found) return;
  for (const auto& storage : origin.layout.storages()) model.layout.add_storage(storage);
}

void CarriedSource::read(const distckpt::Region& region,
                         std::span<std::byte> packed,
                         std::vector<distckpt::ChecksumPart>& parts) {
  if (region.at.storage < num_in_memory_) return memory_.read(region, packed, parts);
  auto there = region;
  there.at.storage -= num_in_memory_;
  std::vector<distckpt::ChecksumPart> of_file;
  files_->read(there, packed, of_file);
  for (auto part : of_file) {
    part.storage += num_in_memory_;
    parts.push_back(part);
  }
}

void CarriedSource::commit(std::span<const distckpt::ChecksumPart> parts) {
  std::vector<distckpt::ChecksumPart> in_memory, in_files;
  for (auto part : parts) {
    if (part.storage < num_in_memory_) {
      in_memory.push_back(part);
    } else {
      part.storage -= num_in_memory_;
      in_files.push_back(part);
    }
  }
  memory_.commit(in_memory);
  files_->commit(in_files);
}

std::string CarriedSource::name_of(distckpt::StorageId storage) const {
  return storage < num_in_memory_ ? memory_.name_of(storage)
                                  : files_->name_of(storage - num_in_memory_);
}

}  // namespace ferry::converter
