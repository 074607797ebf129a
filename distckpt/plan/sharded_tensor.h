// One rank's part of a global tensor, as Megatron-Core's sharded_state_dict() describes it
// (megatron/core/dist_checkpointing/mapping.py). Plans are made from ShardedTensors alone, on any
// machine; only an executor moves data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "distckpt/base/box.h"
#include "distckpt/base/dtype.h"

namespace ferry::distckpt {

struct ShardedTensor {
  std::string key{};  // "decoder.layers.mlp.linear_fc2.weight"
  DType dtype = DType::kBF16;
  Shape local_shape{};            //         [hidden, ffn/tp]
  Shape global_shape{};           // [layers, hidden, ffn]
  Dims global_offset{};           // [layer,  0,      rank * ffn/tp]
  int prepend_axis_num = 0;       // leading dimensions that local_shape lacks; 1 above
  std::vector<int> replica_id{};  // all zero: this rank writes. Others hold the same bytes

  // Optimizer state of Megatron-Core <= 0.15 only: the elements of the flattened local tensor that
  // this rank holds.
  std::optional<std::pair<std::int64_t, std::int64_t>> flattened_range{};

  bool is_main_replica() const;
  Box box() const;        // the part held here, in global_shape
  void validate() const;  // throws Error(kLayout) naming the dimension if box() leaves global_shape
};

// A ShardedTensor and the memory that holds it.
struct LocalShard {
  ShardedTensor tensor{};
  std::byte* data = nullptr;
  Dims strides{};   // in elements, of local_shape; empty: row-major
  int device = -1;  // -1: the host
  std::shared_ptr<const void> owner{};

  Dims byte_strides() const;  // of local_shape: the given ones, or row-major
};

// A part of the state that is not a tensor: extra state, RNG, cursors. Stored pickled, under
// "<key>/shard_<offset>_<shape>".
struct ShardedObject {
  std::string key{};
  Shape global_shape{};
  Dims global_offset{};

  std::string unique_key() const;  // "decoder.layers.mlp.linear_fc1._extra_state/shard_0_4"
};

// The inverse of unique_key; nothing if the text is not one.
std::optional<ShardedObject> parse_unique_key(std::string_view text);

}  // namespace ferry::distckpt
