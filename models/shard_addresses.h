// Where the shards of a sharded_state_dict() begin, in its order: all of it that changes when
// parameters move to other memory.
#pragma once

#include <cstddef>
#include <vector>

#include "models/parameters.h"

namespace ferry::models {

inline void append_shard_addresses(const Parameters& parameters,
                                   std::vector<std::byte*>& addresses) {
  for (const auto& [spec, value] : parameters.all()) {
    auto* address = static_cast<std::byte*>(value.data_ptr());
    for (const auto& box : spec.boxes) {
      addresses.push_back(address);
      address += box.volume() * size_of(spec.dtype);
    }
  }
}

// Of chunks: unique_ptrs or pointers.
template <typename Chunks>
std::vector<std::byte*> shard_addresses(const Chunks& chunks) {
  std::vector<std::byte*> all;
  for (const auto& chunk : chunks) append_shard_addresses(chunk->parameters(), all);
  return all;
}

}  // namespace ferry::models
