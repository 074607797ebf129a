// Runs whose memory was worked out by hand, or measured.
#pragma once

#include <vector>

#include "models/spec/transformer_config.h"
#include "trainer/config/ppo_config.h"

namespace ferry::support {

inline models::TransformerConfig llama_8b() {
  return {.family = "llama",
          .num_layers = 32,
          .hidden_size = 4096,
          .ffn_hidden_size = 14336,
          .num_attention_heads = 32,
          .num_query_groups = 8,
          .kv_channels = 128,
          .vocab_size = 128256,
          .max_position_embeddings = 8192};
}

inline models::TransformerConfig qwen3_32b() {
  return {.family = "qwen3",
          .num_layers = 64,
          .hidden_size = 5120,
          .ffn_hidden_size = 25600,
          .num_attention_heads = 64,
          .num_query_groups = 8,
          .kv_channels = 128,
          .vocab_size = 151936,
          .max_position_embeddings = 40960,
          .qk_layernorm = true};
}

inline models::TransformerConfig qwen3_30b_a3b() {
  return {.family = "qwen3_moe",
          .num_layers = 48,
          .hidden_size = 2048,
          .ffn_hidden_size = 6144,
          .num_attention_heads = 32,
          .num_query_groups = 4,
          .kv_channels = 128,
          .vocab_size = 151936,
          .max_position_embeddings = 40960,
          .qk_layernorm = true,
          .num_moe_experts = 128,
          .moe_layer_freq = std::vector<bool>(48, true),
          .moe_ffn_hidden_size = 768,
          .moe_router_topk = 8};
}

// 64 prompts x 8 answers of 128 + 932 tokens, mini-batches of 16 prompts.
inline trainer::PpoConfig grpo() {
  auto config = trainer::default_ppo_config("grpo");
  config.model.path = "llama";
  config.data.train_files = {"none"};
  config.data.train_batch_size = 64;
  config.data.max_prompt_length = 128;
  config.data.max_response_length = 932;
  config.actor.ppo_mini_batch_size = 16;
  return config;
}

}  // namespace ferry::support
