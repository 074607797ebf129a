// The memory of keys and values: blocks of tokens, in every layer the same numbers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "models/gpt_model.h"

namespace ferry::rollout {

// A slot, and one that takes what is in it.
struct CopiedSlot {
  std::int64_t from = 0;
  std::int64_t to = 0;
};

class KVCache {
 public:
  static constexpr std::int64_t kBlockSize = 64;  // tokens: as many as flash reads at a time

  // Of all layers of a model, on this rank.
  static std::int64_t bytes_per_block(const models::GPTModel& model);

  // One block more than `num_blocks` is kept, for rows that nobody reads. The model outlives this.
  // Throws Error(kDevice) if there is no memory.
  KVCache(const models::GPTModel& model, std::int64_t num_blocks);

  // Gives the memory back, and takes as much again: what was in it is gone.
  void release();
  void allocate();

  std::int64_t num_blocks() const { return num_blocks_; }
  const at::Tensor& key(std::int64_t layer) const {
    return at(keys_, layer);
  }  // [blocks, block_size, groups, dim]
  const at::Tensor& value(std::int64_t layer) const {
    return at(values_, layer);
  }  // [blocks, block_size, groups, value_dim]

  // Keys and values of each layer.
  std::vector<std::pair<at::Tensor, at::Tensor>> layers() const;

  // slots [rows], int64: block * block_size + offset; -1: nowhere. key [rows, groups, dim], value
  // [rows, groups, value_dim].
  void store(std::int64_t layer,
             const at::Tensor& slots,
             const at::Tensor& key,
             const at::Tensor& value);  // undefined where none is kept
  // What lies in slots[0] goes to slots[1] as well. slots [2, tokens], int64.
  void copy(std::int64_t layer, const at::Tensor& slots);

 private:
  static const at::Tensor& at(const std::vector<at::Tensor>& of_layers, std::int64_t layer) {
    return of_layers[static_cast<std::size_t>(layer)];
  }

  const models::GPTModel& model_;
  std::int64_t num_blocks_;
  std::vector<at::Tensor> keys_, values_;  // of each layer
};

}  // namespace ferry::rollout
