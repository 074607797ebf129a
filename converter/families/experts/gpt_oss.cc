// GPT-OSS: a sink in the softmax of each head, sliding windows in every second layer, biases
// everywhere. The experts of a layer are one tensor, transposed, whose columns of gate and up take
// turns.
#include "converter/families/family.h"
#include "distckpt/base/error.h"

namespace ferry::converter {
namespace {

using models::TransformerConfig;

constexpr HfName kGptOssAttention[] = {
    {"self_attention.linear_qkv.weight", "self_attn.{q,k,v}_proj.weight"},
    {"self_attention.linear_qkv.bias", "self_attn.{q,k,v}_proj.bias"},
    {"self_attention.linear_proj.weight", "self_attn.o_proj.weight"},
    {"self_attention.linear_proj.bias", "self_attn.o_proj.bias"},
    {"self_attention.core_attention.softmax_offset", "self_attn.sinks"},
    {"self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"},
};

constexpr HfName kGptOssMoe[] = {
    {"pre_mlp_layernorm.weight", "post_attention_layernorm.weight"},
    {"mlp.router.weight", "mlp.router.weight"},
    {"mlp.router.bias", "mlp.router.bias"},
    {.parameter = "mlp.experts.experts.linear_fc1.weight",
     .hf = "mlp.experts.gate_up_proj",
     .transposed = true,
     .interleaved = true},
    {.parameter = "mlp.experts.experts.linear_fc1.bias",
     .hf = "mlp.experts.gate_up_proj_bias",
     .interleaved = true},
    {.parameter = "mlp.experts.experts.linear_fc2.weight",
     .hf = "mlp.experts.down_proj",
     .transposed = true},
    {"mlp.experts.experts.linear_fc2.bias", "mlp.experts.down_proj_bias"},
};

constexpr HfNames kGptOssNames{
    .first = kEmbeddingNames,
    .attention = kGptOssAttention,
    .moe_mlp = kGptOssMoe,
    .last = kHeadNames,
    .mxfp4_experts = true,
};

constexpr BridgeModel kGptOssProvider{
    .settings = R"({"moe_router_load_balancing_type": "none"})",
};

constexpr Family kGptOss[] = {
    {.model_type = "gpt_oss",
     .names = &kGptOssNames,
     .defaults = R"({"rms_norm_eps": 1e-05, "sliding_window": 128, "head_dim": 64})",
     .rotary_base = 150000.0,
     .num_experts_key = "num_local_experts",
     .traits = {.norms_round_once = true},
     .head_classes = HeadClasses::kOfSequencesAndTokens,
     .configure =
         [](const ConfigFields& fields, TransformerConfig& config) {
           require(fields.flag("attention_bias", true), ErrorKind::kLayout,
                   "{}: attention_bias is false, which Megatron-Core has not beside the biases of "
                   "experts",
                   fields.source());
           config.add_bias_linear = true;
           config.softmax_offset = true;
           config.activation = models::Activation::kQuickGeglu;
           config.glu_linear_offset = 1.0;
           config.activation_func_clamp_value =
               fields.optional_number("swiglu_limit").value_or(7.0);
           config.sliding_window = fields.optional_size("sliding_window");
           if (config.sliding_window)
             config.window_attn_skip_freq = sliding_layers(
                 fields, config.num_layers, [](std::int64_t layer) { return layer % 2 == 0; });
           config.num_moe_experts = fields.size("num_local_experts", std::nullopt, kMaxExperts);
           config.moe_layer_freq.assign(static_cast<std::size_t>(config.num_layers), true);
           config.moe_ffn_hidden_size = config.ffn_hidden_size;
           config.moe_router_topk = fields.size("num_experts_per_tok", 4);
           // transformers' default, where config.json names none at all.
           if (fields.find("rope_parameters") != nullptr || fields.find("rope_scaling") != nullptr)
             return;
           config.rope_scaling = {.type = models::RopeType::kYarn,
                                  .factor = 32.0,
                                  .beta_fast = 32.0,
                                  .beta_slow = 1.0,
                                  .original_max_position_embeddings = 4096,
                                  .truncate = false};
         },
     .describes = [](const TransformerConfig& config) { return config.softmax_offset; },
     .rare = true,
     .bridge = &kGptOssProvider},
};

}  // namespace

const std::span<const Family> kGptOssFamilies = kGptOss;

}  // namespace ferry::converter
