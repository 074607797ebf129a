// Phi-3, Phi-3.5 and Phi-4 without experts: query, key and value in one tensor, gate and up in
// another; Phi-4-mini turns a part of a head's channels.
#include "converter/families/family.h"

namespace ferry::converter {
namespace {

using models::TransformerConfig;

constexpr HfName kPhiAttentionNames[] = {
    {"self_attention.linear_qkv.weight", "self_attn.qkv_proj.weight"},
    {"self_attention.linear_proj.weight", "self_attn.o_proj.weight"},
    {"self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"},
};

constexpr HfName kPhiMlpNames[] = {
    {"mlp.linear_fc1.weight", "mlp.gate_up_proj.weight"},
    {"mlp.linear_fc2.weight", "mlp.down_proj.weight"},
    {"mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"},
};

constexpr HfNames kPhiNames{
    .first = kEmbeddingNames,
    .attention = kPhiAttentionNames,
    .dense_mlp = kPhiMlpNames,
    .last = kHeadNames,
};

constexpr std::string_view kPhiLongrope[] = {"su", "yarn"};

constexpr Family kPhi[] = {
    {.model_type = "phi3",
     .names = &kPhiNames,
     .defaults = R"({"rms_norm_eps": 1e-05, "max_position_embeddings": 4096,
                     "original_max_position_embeddings": 4096})",
     .turns_in_part = true,
     .longrope_names = kPhiLongrope,
     .head_classes = HeadClasses::kOfSequencesAndTokens,
     .configure =
         [](const ConfigFields& fields, TransformerConfig& config) {
           config.sliding_window = fields.optional_size("sliding_window");
         }},  // Megatron's arguments describe it as a Llama or a Mistral
};

}  // namespace

const std::span<const Family> kPhiFamilies = kPhi;

}  // namespace ferry::converter
