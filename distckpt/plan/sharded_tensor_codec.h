// A rank's ShardedTensors as bytes for the other ranks, without their memory. Keys that follow each
// other share their beginnings, numbers are of variable length.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/plan/sharded_tensor.h"

namespace ferry::distckpt {

// Throws Error(kLayout) for a tensor that validate() refuses.
std::string encode_sharded_tensors(std::span<const ShardedTensor> tensors);

// The inverse. Throws Error(kCorrupt) that names `source` and the byte for anything else; every
// tensor is valid.
std::vector<ShardedTensor> decode_sharded_tensors(std::string_view bytes, std::string_view source);
// The tensors of each rank, out of the bytes that each encoded.
std::vector<std::vector<ShardedTensor>> decode_ranks(std::span<const std::string> ranks);

}  // namespace ferry::distckpt
