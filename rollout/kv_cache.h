// The memory of keys and values: blocks of tokens, with the same block numbers in every layer of a
// group (KVCacheGroups), and the same memory for layers of other groups; and of the states of
// sequences in layers with linear attention, which have no keys: a slot for each sequence that
// runs, and for each prefix whose states are kept.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "distckpt/base/integers.h"
#include "models/gpt_model.h"
#include "models/spec/costs.h"
#include "rollout/schedule/kv_cache_groups.h"

namespace ferry::rollout {

class KVCache {
 public:
  static constexpr std::int64_t kBlockSize = models::kCacheBlockTokens;

  static std::int64_t blocks_of(std::int64_t tokens) {
    return distckpt::ceil_div(tokens, kBlockSize);
  }
  // Bytes of a block in all layers of a group, on this rank.
  static std::int64_t bytes_per_block(const models::GPTModel& model);
  // Bytes of a slot in all layers; 0 in models without linear attention.
  static std::int64_t bytes_per_slot(const models::GPTModel& model);

  // Allocates one block more than `num_blocks`, for rows that nobody reads, another one of zeros
  // where layers have sliding windows, for keys that nobody sees, and one slot more than
  // `num_slots` if the model has linear attention, slot `num_slots` for the same. The model
  // outlives this. Throws Error(kDevice) if there is no memory.
  KVCache(const models::GPTModel& model, std::int64_t num_blocks, std::int64_t num_slots = 1);

  // release() frees the memory and its content; allocate() takes as much again.
  void release();
  void allocate();

  std::int64_t num_blocks() const { return num_blocks_; }
  // The entry of a table for Sequence::kNoBlock.
  std::int32_t unseen_block() const { return static_cast<std::int32_t>(num_blocks_); }
  const KVCacheGroups& groups() const { return groups_; }
  std::size_t group_of(std::int64_t layer) const {
    return static_cast<std::size_t>(place_of(layer).group);
  }
  const at::Tensor& key(std::int64_t layer) const {
    return keys_[static_cast<std::size_t>(place_of(layer).index)];
  }  // [blocks, block_size, groups, dim]
  const at::Tensor& value(std::int64_t layer) const {
    return values_[static_cast<std::size_t>(place_of(layer).index)];
  }  // [blocks, block_size, groups, value_dim]

  // The slot of states for rows that nobody reads.
  std::int64_t unread_slot() const { return num_slots_; }
  const models::LinearStates& states(std::int64_t layer) const {
    return states_[static_cast<std::size_t>(layer)];
  }

  // (keys, values) of each layer.
  std::vector<std::pair<at::Tensor, at::Tensor>> layers() const;

  // Writes rows to their slots. slots [rows], int64: block * block_size + offset; -1: nowhere.
  // key [rows, groups, dim], value [rows, groups, value_dim] or undefined if none is kept.
  void store(std::int64_t layer,
             const at::Tensor& slots,
             const at::Tensor& key,
             const at::Tensor& value);
  // Copies the content of slots[0] to slots[1]. slots [2, tokens], int64.
  void copy(std::int64_t layer, const at::Tensor& slots);
  // Copies the states in slots[0] to slots[1], in all layers. slots [2, sequences], int64.
  void copy_states(const at::Tensor& slots);

 private:
  const KVCacheGroups::Place& place_of(std::int64_t layer) const {
    return groups_.places[static_cast<std::size_t>(layer)];
  }

  const models::GPTModel& model_;
  KVCacheGroups groups_;
  std::int64_t num_blocks_, num_slots_;
  // The tensors of each layer of a group; empty ones of linear attention.
  std::vector<at::Tensor> keys_, values_;
  std::vector<models::LinearStates> states_;  // of each layer; empty ones of other attention
};

}  // namespace ferry::rollout
