#include "rollout/routed_experts.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <cstring>

#include "distckpt/base/error.h"
#include "models/distributed/world.h"

namespace ferry::rollout {

namespace {

std::int64_t bytes_per_token(const models::TransformerConfig& config) {
  const auto type = models::routed_experts_type(config.num_moe_experts);
  return static_cast<std::int64_t>(layers_with_experts(config).size() * c10::elementSize(type)) *
         config.moe_router_topk;
}

}  // namespace

std::vector<std::int64_t> layers_with_experts(const models::TransformerConfig& config) {
  std::vector<std::int64_t> layers;
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer)
    if (config.num_moe_experts > 0 && config.is_moe_layer(layer)) layers.push_back(layer);
  return layers;
}

at::Tensor routed_experts_tensor(std::span<const std::byte> bytes,
                                 const models::TransformerConfig& config) {
  const auto tokens = static_cast<std::int64_t>(bytes.size()) / bytes_per_token(config);
  const auto layers = static_cast<std::int64_t>(layers_with_experts(config).size());
  auto tensor = at::empty({tokens, layers, config.moe_router_topk},
                          models::routed_experts_type(config.num_moe_experts));
  std::ranges::copy(bytes, static_cast<std::byte*>(tensor.mutable_data_ptr()));
  return tensor;
}

models::RouterReplay StepRoutes::recording() {
  return {.record = [this](std::int64_t, const at::Tensor& experts) {
    of_layers_.push_back(experts.to(models::routed_experts_type(model_.config().num_moe_experts)));
  }};
}

// Gathers bytes, because no collective knows numbers of two bytes.
at::Tensor StepRoutes::gather() const {
  const auto mine = at::stack(of_layers_, 1).flatten(1).view(at::kByte);
  return model_.mesh().tp().all_gather(mine);
}

RoutedExperts::RoutedExperts(const models::GPTModel& model,
                             std::int64_t num_blocks,
                             std::int64_t block_size)
    : block_size_(block_size),
      bytes_(at::empty({num_blocks * block_size, bytes_per_token(model.config())}, at::kByte)) {}

void RoutedExperts::store(std::span<const std::int64_t> slots, const at::Tensor& routes) {
  const auto token_bytes = bytes_.size(1);
  const auto rows = static_cast<std::int64_t>(slots.size());
  require(routes.size(0) == rows && routes.size(1) == token_bytes, ErrorKind::kBug,
          "routes of {} rows, of {} bytes, for {} slots of {}", routes.size(0), routes.size(1),
          rows, token_bytes);
  const auto* from = routes.const_data_ptr<std::uint8_t>();
  auto* const to = bytes_.mutable_data_ptr<std::uint8_t>();
  for (const auto slot : slots) {
    std::copy_n(from, token_bytes, to + slot * token_bytes);
    from += token_bytes;
  }
}

void RoutedExperts::copy(std::span<const CopiedSlot> slots) {
  const auto token_bytes = bytes_.size(1);
  auto* const bytes = bytes_.mutable_data_ptr<std::uint8_t>();
  for (const auto& slot : slots)
    std::copy_n(bytes + slot.from * token_bytes, token_bytes, bytes + slot.to * token_bytes);
}

std::vector<std::byte> RoutedExperts::read(std::span<const std::int32_t> block_table,
                                           std::int64_t begin,
                                           std::int64_t end) const {
  const auto token_bytes = bytes_.size(1);
  std::vector<std::byte> routes(static_cast<std::size_t>((end - begin) * token_bytes));
  const auto* const from = bytes_.const_data_ptr<std::uint8_t>();
  auto* to = routes.data();
  for (auto token = begin; token < end;) {  // a block's slots are contiguous
    const auto offset = token % block_size_;
    const auto count = std::min(end - token, block_size_ - offset);
    const auto block = block_table[static_cast<std::size_t>(token / block_size_)];
    const auto slot = block * block_size_ + offset;
    std::memcpy(to, from + slot * token_bytes, static_cast<std::size_t>(count * token_bytes));
    to += count * token_bytes;
    token += count;
  }
  return routes;
}

}  // namespace ferry::rollout
