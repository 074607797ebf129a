// Llama, Mistral, Qwen2, Qwen3 and Seed-OSS: dense layers with attention by query groups. They
// differ in biases, norms of queries and keys, and a sliding window.
#include "converter/families/family.h"
#include "distckpt/base/error.h"

namespace ferry::converter {
namespace {

using models::TransformerConfig;

constexpr HfNames kNames{
    .first = kEmbeddingNames,
    .attention = kAttentionNames,
    .dense_mlp = kMlpNames,
    .last = kHeadNames,
};

bool is_dense(const TransformerConfig& config) {
  return !config.multi_latent_attention && config.num_moe_experts == 0;
}

constexpr Family kFamilies[] = {
    {.model_type = "llama",
     .names = &kNames,
     .configure = read_linear_biases,
     .describes =
         [](const TransformerConfig& config) {
           return is_dense(config) && !config.qk_layernorm && !config.add_qkv_bias &&
                  !config.sliding_window;
         }},
    {.model_type = "mistral",
     .names = &kNames,
     .configure =
         [](const ConfigFields& fields, TransformerConfig& config) {
           read_linear_biases(fields, config);
           config.sliding_window = fields.optional_size("sliding_window");
         },
     .describes =
         [](const TransformerConfig& config) {
           return is_dense(config) && !config.qk_layernorm && !config.add_qkv_bias &&
                  config.sliding_window.has_value();
         }},
    {.model_type = "qwen2",
     .names = &kNames,
     .configure =
         [](const ConfigFields& fields, TransformerConfig& config) {
           read_linear_biases(fields, config);
           config.add_qkv_bias = true;
         },
     .describes =
         [](const TransformerConfig& config) {
           return is_dense(config) && !config.qk_layernorm && config.add_qkv_bias;
         }},
    {.model_type = "qwen3",
     .names = &kNames,
     .configure =
         [](const ConfigFields& fields, TransformerConfig& config) {
           read_linear_biases(fields, config);
           config.qk_layernorm = true;
         },
     .describes =
         [](const TransformerConfig& config) { return is_dense(config) && config.qk_layernorm; }},
    {.model_type = "seed_oss",
     .names = &kNames,
     .configure =
         [](const ConfigFields& fields, TransformerConfig& config) {
           for (const auto* key : {"attention_out_bias", "mlp_bias"}) {
             require(!fields.flag(key, false), ErrorKind::kLayout,
                     "{}: {} is true, which is not handled", fields.source(), key);
           }
           config.add_qkv_bias = fields.flag("attention_bias", true);
         }},
};

}  // namespace

const std::span<const Family> kLlamaFamilies = kFamilies;

}  // namespace ferry::converter
