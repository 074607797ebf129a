#include "trainer/metrics/flops.h"

#include <array>
#include <utility>

namespace ferry::trainer {
namespace {

using models::TransformerConfig;

struct HeadSizes {
  std::int64_t query = 0;  // and key
  std::int64_t value = 0;
};

HeadSizes head_sizes(const TransformerConfig& c) {
  if (!c.multi_latent_attention) return {.query = c.kv_channels, .value = c.kv_channels};
  return {.query = c.qk_head_dim + c.qk_pos_emb_head_dim, .value = c.v_head_dim};
}

std::int64_t attention_weights(const TransformerConfig& c) {
  const auto heads = c.num_attention_heads;
  const auto size = head_sizes(c);
  if (!c.multi_latent_attention)
    return c.hidden_size * size.query * (2 * heads + 2 * c.num_query_groups);
  const auto query = c.q_lora_rank == 0 ? c.hidden_size * heads * size.query
                                        : c.q_lora_rank * (c.hidden_size + heads * size.query);
  const auto key_value = c.hidden_size * (c.kv_lora_rank + c.qk_pos_emb_head_dim) +
                         c.kv_lora_rank * heads * (c.qk_head_dim + size.value);
  return query + key_value + heads * size.value * c.hidden_size;
}

// Of the experts, those that a token meets.
std::int64_t mlp_weights(const TransformerConfig& c, std::int64_t layer) {
  if (!c.is_moe_layer(layer)) return 3 * c.hidden_size * c.ffn_hidden_size;
  const auto ffn =
      c.moe_router_topk * c.moe_ffn_hidden_size + c.moe_shared_expert_intermediate_size;
  return 3 * c.hidden_size * ffn + c.hidden_size * c.num_moe_experts;
}

}  // namespace

double training_flops(const TransformerConfig& config, std::span<const std::int64_t> lengths) {
  auto weights = 2 * config.vocab_size * config.hidden_size;
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer)
    weights += attention_weights(config) + mlp_weights(config, layer);
  double tokens = 0;
  double squares = 0;
  for (const auto length : lengths) {
    tokens += static_cast<double>(length);
    squares += static_cast<double>(length) * static_cast<double>(length);
  }
  const auto size = head_sizes(config);
  const auto per_square =
      3 * (size.query + size.value) * config.num_attention_heads * config.num_layers;
  return 6 * tokens * static_cast<double>(weights) + squares * static_cast<double>(per_square);
}

std::optional<double> peak_flops(std::string_view device) {
  // The makers' data sheets, without sparsity. A name that begins with another stands before it.
  constexpr std::array<std::pair<std::string_view, double>, 8> kPeaks{{{"GB200", 2500e12},
                                                                       {"B200", 2250e12},
                                                                       {"H100", 989e12},
                                                                       {"H200", 989e12},
                                                                       {"H800", 989e12},
                                                                       {"A100", 312e12},
                                                                       {"A800", 312e12},
                                                                       {"H20", 148e12}}};
  for (const auto& [name, peak] : kPeaks) {
    if (device.find(name) != std::string_view::npos) return peak;
  }
  return std::nullopt;
}

}  // namespace ferry::trainer
