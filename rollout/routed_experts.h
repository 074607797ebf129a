// Where routers sent the tokens whose keys the cache has (vLLM's enable_return_routed_experts): on
// the host, by the slots of the cache's blocks. So a sequence that finds a block which another one
// computed finds its routes there as well, and one that computes it again writes over them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "models/gpt_model.h"
#include "models/spec/transformer_config.h"
#include "rollout/kv_cache.h"

namespace ferry::rollout {

// Of the whole model, in its order.
std::vector<std::int64_t> layers_with_experts(const models::TransformerConfig& config);

// Routes of tokens, as an engine hands them out: [tokens, layers with experts, topk] of
// models::routed_experts_type().
at::Tensor routed_experts_tensor(std::span<const std::byte> bytes,
                                 const models::TransformerConfig& config);

// What routers choose in one step, on the device.
class StepRoutes {
 public:
  explicit StepRoutes(const models::GPTModel& model) : model_(model) {}

  models::RouterReplay recording();  // of the step's forward; this outlives it

  // Behind it, by all tensor parallel ranks, each of which has the choices of its share of the
  // rows: the bytes of all, [rows, bytes of a token].
  at::Tensor gather() const;

 private:
  const models::GPTModel& model_;
  std::vector<at::Tensor> of_layers_;  // [rows/tp, topk]
};

class RoutedExperts {
 public:
  // Of a model with experts, for a cache of so many blocks.
  RoutedExperts(const models::GPTModel& model, std::int64_t num_blocks, std::int64_t block_size);

  // Of a step's first rows, in the order of the steps: their slots, and what StepRoutes has of
  // them, on the host.
  void store(std::span<const std::int64_t> slots, const at::Tensor& routes);
  void copy(std::span<const CopiedSlot> slots);  // behind the step's rows, as KVCache::copy()

  // Of the tokens from `begin` to `end` of a sequence with these blocks: the bytes of a
  // routed_experts_tensor().
  std::vector<std::byte> read(std::span<const std::int32_t> block_table,
                              std::int64_t begin,
                              std::int64_t end) const;

 private:
  std::int64_t block_size_;
  at::Tensor bytes_;  // [slots, bytes of a token], uint8
};

}  // namespace ferry::rollout
