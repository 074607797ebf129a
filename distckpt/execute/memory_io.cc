#include "distckpt/execute/memory_io.h"

#include <cstddef>
#include <variant>

#include "distckpt/base/error.h"

namespace ferry::distckpt {
namespace {

const MemoryStorage& host_memory(const std::vector<Storage>& storages, const Region& region) {
  const auto& memory = memory_of(storages, region);
  require(memory.device < 0, ErrorKind::kBug, "memory of device {} is not the host's",
          memory.device);
  return memory;
}

}  // namespace

const MemoryStorage& memory_of(const std::vector<Storage>& storages, const Region& region) {
  const auto& storage = storages.at(region.at.storage);
  const auto* memory = std::get_if<MemoryStorage>(&storage);
  require(memory != nullptr, ErrorKind::kBug, "{} is not this rank's memory", describe(storage));
  require(
      region.num_bytes() == 0 || (region.at.offset >= 0 && fold_runs(region).end() <= memory->size),
      ErrorKind::kBug, "a box leaves the {} bytes of its shard", memory->size);
  return *memory;
}

void MemorySource::read(const Region& region,
                        std::span<std::byte> packed,
                        std::vector<ChecksumPart>& /*parts*/) {
  const auto& memory = host_memory(storages_, region);
  if (packed.empty()) return;
  copy_strided(packed.data(), packed_strides(region), memory.data + region.at.offset,
               region.at.strides, region.size, region.element_size);
}

MemorySink::MemorySink(const Layout& layout)
    : storages_(layout.storages()), shards_(storages_.size()) {
  for (const auto& tensor : layout.tensors()) {
    for (const auto& shard : tensor.shards) {
      if (!std::holds_alternative<MemoryStorage>(storages_.at(shard.at.storage))) continue;
      auto& one = shards_[shard.at.storage];
      if (one.name.empty()) one.name = fmt::format("{} {}", tensor.name, to_string(shard.box));
      one.bytes += shard.box.volume() * size_of(tensor.dtype);
    }
  }
}

void MemorySink::write(const Region& region,
                       std::span<const std::byte> packed,
                       std::vector<ChecksumPart>& /*parts*/) {
  const auto& memory = host_memory(storages_, region);
  if (packed.empty()) return;
  copy_strided(memory.data + region.at.offset, region.at.strides, packed.data(),
               packed_strides(region), region.size, region.element_size);
  count(region);
}

std::span<std::byte> MemorySink::lease(const Region& region) {
  const auto& memory = host_memory(storages_, region);
  const auto runs = fold_runs(region);
  if (runs.num_runs() != 1) return {};
  return {memory.data + runs.offset, static_cast<std::size_t>(runs.run_bytes)};
}

void MemorySink::put(const Region& region, std::span<std::byte> /*leased*/) {
  count(region);
}

void MemorySink::count(const Region& region) {
  shards_.at(region.at.storage).written += region.num_bytes();
}

void MemorySink::finish() {
  for (const auto& shard : shards_) {
    require(shard.written == shard.bytes, ErrorKind::kBug, "{}: {} of its {} bytes were written",
            shard.name, shard.written.load(), shard.bytes);
  }
}

}  // namespace ferry::distckpt
