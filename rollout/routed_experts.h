// The experts that routers chose for the tokens in the cache (vLLM's enable_return_routed_experts),
// on the host, by the slots of the cache's blocks. A sequence that finds a block which another one
// computed finds its routes there as well, and one that computes it again overwrites them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "models/gpt_model.h"
#include "models/spec/transformer_config.h"
#include "rollout/schedule/slot_copies.h"

namespace ferry::rollout {

// The layers of the whole model that have experts, ascending.
std::vector<std::int64_t> layers_with_experts(const models::TransformerConfig& config);

// The routes that an engine returns, as a tensor [tokens, layers with experts, topk] of
// models::routed_experts_type().
at::Tensor routed_experts_tensor(std::span<const std::byte> bytes,
                                 const models::TransformerConfig& config);

// The choices of the routers in one step, on the device.
class StepRoutes {
 public:
  explicit StepRoutes(const models::GPTModel& model) : model_(model) {}

  models::RouterReplay recording();  // for the step's forward; this outlives it

  // Called after the forward by all tensor parallel ranks, each of which has the choices of its
  // share of the rows. Returns the bytes of all rows, [rows, bytes of a token].
  at::Tensor gather() const;

 private:
  const models::GPTModel& model_;
  std::vector<at::Tensor> of_layers_;  // [rows/tp, topk]
};

class RoutedExperts {
 public:
  // The model has experts; the cache has so many blocks.
  RoutedExperts(const models::GPTModel& model, std::int64_t num_blocks, std::int64_t block_size);

  // Keeps the routes of a step's first rows. slots [rows]; routes: the rows of
  // StepRoutes::gather(), on the host. Steps come in the order in which they were launched.
  void store(std::span<const std::int64_t> slots, const at::Tensor& routes);
  void copy(std::span<const CopiedSlot> slots);  // after store(), like KVCache::copy()

  // The bytes of a routed_experts_tensor() for the tokens begin .. end - 1 of a sequence with these
  // blocks.
  std::vector<std::byte> read(std::span<const std::int32_t> block_table,
                              std::int64_t begin,
                              std::int64_t end) const;

 private:
  std::int64_t block_size_;
  at::Tensor bytes_;  // [slots, bytes of a token], uint8
};

}  // namespace ferry::rollout
