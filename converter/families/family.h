// A family of Hugging Face models beside the table of parameters (models/spec): the names of its
// tensors, and what its config.json says. One file of a folder beside this one describes one family
// or several that are alike. docs/adding_a_family.md works an example.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string_view>

#include "converter/families/bridge_model.h"
#include "converter/families/config_fields.h"
#include "models/spec/parameter_table.h"
#include "models/spec/transformer_config.h"

namespace ferry::converter {

// The tensors of a checkpoint that make up a parameter of the table, both below the prefix of their
// layer: {a,b,c} stands for one tensor each, {e} for each expert. One tensor for the parameters of
// all experts counts them in its first dimension; one name for a parameter of several parts (query,
// key and value; gate and up) is one tensor in which they lie one above the other.
// Several parameters may lie in one tensor, {a,b} of `parameter`: for each of `groups`, its rows of
// the first, then its rows of the second.
struct HfName {
  std::string_view parameter;
  std::string_view hf;
  models::When when = models::when::kAlways;  // of the row, where two rows have one name
  models::Extent groups = models::extent::kOne;
  // Another `hf`, of checkpoints that have such a tensor: the parameter that holds all experts of a
  // layer in transformers 5, whose state_dict() names it so.
  std::string_view alternative{};
  bool as_row = false;       // [1, n] where the parameter is [n]
  bool transposed = false;   // its last dimension counts the parameter's rows
  bool interleaved = false;  // rows of gate and up take turns, in the last dimension
  bool either_way = false;   // transposed but in checkpoints whose tensor has the other shape
  // Megatron computes with no more of the parameter than `hf`, its first part (or, of a norm, with
  // nothing, and `hf` is a tensor beside it) and leaves the rest as it began: zeros, a norm's ones.
  bool rest_unused = false;
};

// A second tensor that holds the same bytes as another one does: not a tensor of the model, but
// compared, and written where the source had it.
struct HfCopy {
  std::string_view hf;
  std::string_view of;
};

// A tensor of a tower, in one of the layouts in which Megatron checkpoints keep it, or in the model
// that computes it (tower.h).
struct TowerRule {
  std::string_view hf;        // "visual.blocks.{l}.mlp.{gate,up}_proj.weight", one above the other
  std::string_view megatron;  // the key; a stack of the layers where hf alone has {l}. ** behind
                              // both stands for all tensors whose names begin so
  bool heads = false;         // all queries, keys and values: in Megatron head by head
  bool transposed = false;
  bool optional = false;  // of a part that not every tower has: all of its rules or none are there
};

// A beginning of names that the modules of transformers 5.17 have otherwise than files do
// (conversion_mapping.py); one that begins with a dot may be anywhere in a name.
struct ModuleName {
  std::string_view file;
  std::string_view module;
};

// The tensors of a checkpoint, in the order in which they are written.
struct HfNames {
  std::string_view layer = "model.layers.{l}.";
  std::span<const HfName> first{};             // of the first stage; whole names
  std::span<const HfName> attention{};         // of every layer; names below the two prefixes
  std::span<const HfName> linear_attention{};  // of layers with a gated delta net
  std::span<const HfName> mamba{};             // of layers with a Mamba-2 mixer
  std::span<const HfName> dense_mlp{};         // of layers without experts
  std::span<const HfName> moe_mlp{};           // of layers with experts
  std::span<const HfName> last{};              // of the last stage; whole names
  std::span<const HfName> prediction{};  // of a prediction layer, which is written behind the last
                                         // layer as one more and holds such a layer's tensors too
  std::span<const HfCopy> prediction_copies{};
  // The prefix of a prediction layer's own tensors, and that of the layer which it wraps, if they
  // are not named as further layers. {l} counts those layers.
  std::string_view prediction_own{};
  std::string_view prediction_layer{};

  // Tensors whose names begin so are of no parameter, a vision tower's: they travel beside the
  // model.
  std::span<const std::string_view> carried{};
  std::span<const ModuleName> modules{};  // the first one that fits a name counts
  bool experts_together = false;          // files of the hub have them by their `alternative` names
  bool mxfp4_experts = false;  // its experts also lie in files as MXFP4: _blocks and _scales
  bool fp8_experts = false;    // and as FP8, all of a layer in one tensor with _scale_inv
  std::span<const TowerRule> bridge_tower{};    // of Megatron-Bridge
  std::span<const TowerRule> mbridge_tower{};   // of mbridge, and verl with it
  std::span<const TowerRule> computed_tower{};  // of models::VisionModel: the first rule that fits

  std::string_view embedding() const { return first.front().hf; }
  // The name of the output layer, in a model whose ends are untied.
  std::string_view output_layer() const {
    return std::ranges::find(last, models::when::kUntied, &HfName::when)->hf;
  }
};

// The number of prediction layers in config.json, in the object that describes the language model.
struct PredictionCount {
  std::span<const std::string_view> keys{};  // the first that is there counts; a family without
                                             // such layers has none
  std::int64_t unsaid = 0;                   // the number where none of them is there
  std::int64_t limit = kMaxLayers;
  std::string_view flag{};  // where this member is false there are none, whatever their number
  // Tensors whose names begin so are those layers', which transformers leaves out and which have no
  // counterparts here: they travel beside a model that has none.
  std::span<const std::string_view> carried{};
};

// The classes that transformers 5.17 has for a family's models with another head than that of a
// language model (modeling_auto.py).
enum class HeadClasses : std::uint8_t {
  kNone,
  kOfSequences,           // ForSequenceClassification
  kOfSequencesAndTokens,  // and ForTokenClassification
};

struct Family {
  std::string_view model_type{};  // of config.json
  // Another word for it in files of this class, the one that `architectures` name. Models of other
  // classes have that word, too.
  std::string_view shared_model_type{};
  std::string_view architecture{};
  const HfNames* names = nullptr;
  // The object in config.json that describes the language model; all of the file if it has none.
  std::string_view config_key{};
  std::string_view defaults{};  // JSON: what that object need not say, by transformers' class
  // JSON: rope_parameters where neither they nor rope_scaling are there; rope_theta does not count.
  std::string_view default_rope{};
  // Families whose words and defaults that object has where it names one as its model_type.
  std::span<const std::string_view> text_families{};
  // Values of config.json where it says none.
  double rotary_percent = 1.0;   // partial_rotary_factor
  double rotary_base = 10000.0;  // rope_theta
  bool tied = false;             // tie_word_embeddings
  // Its class heeds partial_rotary_factor where positions are not scaled, as do those whose
  // rotary_percent is not 1.
  bool turns_in_part = false;
  bool scales_queries = false;                         // it heeds llama_4_scaling_beta
  std::span<const std::string_view> longrope_names{};  // other words for it, as its rope_type
  // rope_parameters differ by kind of layer: those of full attention are read.
  bool rope_of_layers = false;
  // hidden_act, hidden_activation: the only one handled.
  models::Activation activation = models::Activation::kSilu;
  std::string_view num_experts_key = "num_experts";  // of config.json
  models::FamilyTraits traits{};
  HeadClasses head_classes = HeadClasses::kNone;
  PredictionCount prediction{};
  // Reads what config.json says in the family's own words into a configuration that holds what all
  // families say alike: sizes, rotary embedding, biases.
  void (*configure)(const ConfigFields& fields, models::TransformerConfig& config) = nullptr;
  // Reads the description of a vision tower, out of all of config.json.
  void (*configure_vision)(const ConfigFields& all, models::TransformerConfig& config) = nullptr;
  // True if Megatron's arguments, which name no family, describe one of its models. None of a
  // family whose arguments are those of another.
  bool (*describes)(const models::TransformerConfig& config) = nullptr;
  // True if its models have what only few families have (families.cc, has_rare_parts).
  bool rare = false;
  const BridgeModel* bridge = nullptr;  // null: run_config.yaml has no such model, and `no_bridge`
  std::string_view no_bridge = "Megatron-Bridge 0.6.2 has no model of this family";
  // The model that also sees, of tensors in Megatron-Bridge's layout (tower.h).
  const BridgeModel* bridge_seeing = nullptr;
  // Its tensors have no counterparts in Megatron here: they go from one Hugging Face folder or
  // archive to another as they are, whatever their names and dtypes.
  bool passes_through = false;
};

// Names that several families share.
inline constexpr HfName kEmbeddingNames[] = {
    {"embedding.word_embeddings.weight", "model.embed_tokens.weight"},
};
inline constexpr HfName kAttentionNames[] = {
    {"self_attention.linear_qkv.weight", "self_attn.{q,k,v}_proj.weight"},
    {"self_attention.linear_qkv.bias", "self_attn.{q,k,v}_proj.bias"},
    {"self_attention.linear_proj.weight", "self_attn.o_proj.weight"},
    {"self_attention.linear_proj.bias", "self_attn.o_proj.bias"},
    {"self_attention.q_layernorm.weight", "self_attn.q_norm.weight"},
    {"self_attention.k_layernorm.weight", "self_attn.k_norm.weight"},
    {"self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"},
};
inline constexpr HfName kMlpNames[] = {
    {"mlp.linear_fc1.weight", "mlp.{gate,up}_proj.weight"},
    {"mlp.linear_fc1.bias", "mlp.{gate,up}_proj.bias"},
    {"mlp.linear_fc2.weight", "mlp.down_proj.weight"},
    {"mlp.linear_fc2.bias", "mlp.down_proj.bias"},
    {"mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"},
};
inline constexpr HfName kHeadNames[] = {
    {"decoder.final_layernorm.weight", "model.norm.weight"},
    {"output_layer.weight", "lm_head.weight", models::when::kUntied},
    {"output_layer.weight", "score.weight", models::when::kScore},
    {"output_layer.bias", "score.bias"},
};
// The names of Llama, all together.
inline constexpr HfNames kLlamaNames{
    .first = kEmbeddingNames,
    .attention = kAttentionNames,
    .dense_mlp = kMlpNames,
    .last = kHeadNames,
};
// The names around the layers of a language model in one that also sees, in either spelling.
inline constexpr std::string_view kSeeingLayer = "model.language_model.layers.{l}.";
inline constexpr HfName kSeeingEmbedding[] = {
    {"embedding.word_embeddings.weight", "model.language_model.embed_tokens.weight"},
};
inline constexpr HfName kSeeingHead[] = {
    {"decoder.final_layernorm.weight", "model.language_model.norm.weight"},
    {"output_layer.weight", "lm_head.weight", models::when::kUntied},
    {"output_layer.weight", "score.weight", models::when::kScore},
    {"output_layer.bias", "score.bias"},
};
inline constexpr std::string_view kVisual[] = {"model.visual."};
inline constexpr std::string_view kWrappedLayer = "language_model.model.layers.{l}.";
inline constexpr HfName kWrappedEmbedding[] = {
    {"embedding.word_embeddings.weight", "language_model.model.embed_tokens.weight"},
};
inline constexpr HfName kWrappedHead[] = {
    {"decoder.final_layernorm.weight", "language_model.model.norm.weight"},
    {"output_layer.weight", "language_model.lm_head.weight", models::when::kUntied},
};
inline constexpr ModuleName kWrappedModules[] = {
    {"language_model.model.", "model.language_model."},
    {"language_model.lm_head", "lm_head"},
    {"vision_tower.", "model.vision_tower."},
    {"multi_modal_projector.", "model.multi_modal_projector."},
};
inline constexpr std::string_view kVisionTower[] = {"vision_tower.", "multi_modal_projector."};
inline constexpr TowerRule kBridgeVisionTower[] = {
    {"vision_tower.**", "vision_tower.**"},
    {"multi_modal_projector.**", "multi_modal_projector.**"},
};
// Qwen3-VL's tower, as it is computed.
inline constexpr TowerRule kQwen3Tower[] = {
    {"model.visual.patch_embed.**", "vision_model.patch_embed.**"},
    {"model.visual.pos_embed.**", "vision_model.pos_embed.**"},
    {"model.visual.blocks.{l}.norm1.**",
     "vision_model.decoder.layers.{l}.self_attention.linear_qkv.layer_norm_**"},
    {"model.visual.blocks.{l}.attn.qkv.**",
     "vision_model.decoder.layers.{l}.self_attention.linear_qkv.**"},
    {"model.visual.blocks.{l}.attn.proj.**",
     "vision_model.decoder.layers.{l}.self_attention.linear_proj.**"},
    {"model.visual.blocks.{l}.norm2.**",
     "vision_model.decoder.layers.{l}.mlp.linear_fc1.layer_norm_**"},
    {"model.visual.blocks.{l}.mlp.**", "vision_model.decoder.layers.{l}.mlp.**"},
    {"model.visual.merger.norm.**", "vision_model.merger.patch_norm.**"},
    {"model.visual.merger.**", "vision_model.merger.**"},
    {"model.visual.deepstack_merger_list.{l}.norm.**",
     "vision_model.decoder.deepstack_merger_list.{l}.patch_norm.**"},
    {"model.visual.deepstack_merger_list.{l}.**",
     "vision_model.decoder.deepstack_merger_list.{l}.**"},
};
// The same in checkpoints of Megatron-Bridge and of mbridge, and Qwen3.5's in those of the first,
// which has no deepstack mergers.
inline constexpr TowerRule kQwen3BridgeTower[] = {
    {"model.visual.patch_embed.proj.weight", "vision_model.patch_embed.proj.weight"},
    {"model.visual.patch_embed.proj.bias", "vision_model.patch_embed.proj.bias"},
    {"model.visual.pos_embed.weight", "vision_model.pos_embed.weight"},
    {"model.visual.blocks.{l}.norm1.weight",
     "vision_model.decoder.layers.self_attention.linear_qkv.layer_norm_weight"},
    {"model.visual.blocks.{l}.norm1.bias",
     "vision_model.decoder.layers.self_attention.linear_qkv.layer_norm_bias"},
    {.hf = "model.visual.blocks.{l}.attn.qkv.weight",
     .megatron = "vision_model.decoder.layers.self_attention.linear_qkv.weight",
     .heads = true},
    {.hf = "model.visual.blocks.{l}.attn.qkv.bias",
     .megatron = "vision_model.decoder.layers.self_attention.linear_qkv.bias",
     .heads = true},
    {"model.visual.blocks.{l}.attn.proj.weight",
     "vision_model.decoder.layers.self_attention.linear_proj.weight"},
    {"model.visual.blocks.{l}.attn.proj.bias",
     "vision_model.decoder.layers.self_attention.linear_proj.bias"},
    {"model.visual.blocks.{l}.norm2.weight",
     "vision_model.decoder.layers.mlp.linear_fc1.layer_norm_weight"},
    {"model.visual.blocks.{l}.norm2.bias",
     "vision_model.decoder.layers.mlp.linear_fc1.layer_norm_bias"},
    {"model.visual.blocks.{l}.mlp.linear_fc1.weight",
     "vision_model.decoder.layers.mlp.linear_fc1.weight"},
    {"model.visual.blocks.{l}.mlp.linear_fc1.bias",
     "vision_model.decoder.layers.mlp.linear_fc1.bias"},
    {"model.visual.blocks.{l}.mlp.linear_fc2.weight",
     "vision_model.decoder.layers.mlp.linear_fc2.weight"},
    {"model.visual.blocks.{l}.mlp.linear_fc2.bias",
     "vision_model.decoder.layers.mlp.linear_fc2.bias"},
    {"model.visual.merger.norm.weight", "vision_model.merger.patch_norm.weight"},
    {"model.visual.merger.norm.bias", "vision_model.merger.patch_norm.bias"},
    {"model.visual.merger.linear_fc1.weight", "vision_model.merger.linear_fc1.weight"},
    {"model.visual.merger.linear_fc1.bias", "vision_model.merger.linear_fc1.bias"},
    {"model.visual.merger.linear_fc2.weight", "vision_model.merger.linear_fc2.weight"},
    {"model.visual.merger.linear_fc2.bias", "vision_model.merger.linear_fc2.bias"},
    {.hf = "model.visual.deepstack_merger_list.{l}.norm.weight",
     .megatron = "vision_model.decoder.deepstack_merger_list.patch_norm.weight",
     .optional = true},
    {.hf = "model.visual.deepstack_merger_list.{l}.norm.bias",
     .megatron = "vision_model.decoder.deepstack_merger_list.patch_norm.bias",
     .optional = true},
    {.hf = "model.visual.deepstack_merger_list.{l}.linear_fc1.weight",
     .megatron = "vision_model.decoder.deepstack_merger_list.linear_fc1.weight",
     .optional = true},
    {.hf = "model.visual.deepstack_merger_list.{l}.linear_fc1.bias",
     .megatron = "vision_model.decoder.deepstack_merger_list.linear_fc1.bias",
     .optional = true},
    {.hf = "model.visual.deepstack_merger_list.{l}.linear_fc2.weight",
     .megatron = "vision_model.decoder.deepstack_merger_list.linear_fc2.weight",
     .optional = true},
    {.hf = "model.visual.deepstack_merger_list.{l}.linear_fc2.bias",
     .megatron = "vision_model.decoder.deepstack_merger_list.linear_fc2.bias",
     .optional = true},
};
// The usual name of the number of prediction layers.
inline constexpr std::string_view kNextnLayers[] = {"num_nextn_predict_layers"};
inline constexpr PredictionCount kNextnPrediction{.keys = kNextnLayers};
// Norms of queries and keys over all heads together.
inline constexpr HfName kFullNormAttentionNames[] = {
    {"self_attention.linear_qkv.weight", "self_attn.{q,k,v}_proj.weight"},
    {"self_attention.linear_proj.weight", "self_attn.o_proj.weight"},
    {"self_attention.q_layernorm.weight", "self_attn.q_norm.weight", models::when::kQkNormFull},
    {"self_attention.k_layernorm.weight", "self_attn.k_norm.weight", models::when::kQkNormFull},
    {"self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"},
};
// Mixtral's experts and their router.
inline constexpr ModuleName kMixtralModules[] = {{".block_sparse_moe.", ".mlp."}};
// Experts that are apart on the hub and together in transformers 5.
inline constexpr HfName kGateUpExperts{.parameter = "mlp.experts.experts.linear_fc1.weight",
                                       .hf = "mlp.experts.{e}.{gate,up}_proj.weight",
                                       .alternative = "mlp.experts.gate_up_proj"};
inline constexpr HfName kDownExperts{.parameter = "mlp.experts.experts.linear_fc2.weight",
                                     .hf = "mlp.experts.{e}.down_proj.weight",
                                     .alternative = "mlp.experts.down_proj"};
inline constexpr HfName kMixtralGateUpExperts{
    .parameter = "mlp.experts.experts.linear_fc1.weight",
    .hf = "block_sparse_moe.experts.{e}.{w1,w3}.weight",
    .alternative = "block_sparse_moe.experts.gate_up_proj"};
inline constexpr HfName kMixtralDownExperts{.parameter = "mlp.experts.experts.linear_fc2.weight",
                                            .hf = "block_sparse_moe.experts.{e}.w2.weight",
                                            .alternative = "block_sparse_moe.experts.down_proj"};
// DeepSeek's layout of experts and of prediction layers, which others have taken over.
inline constexpr HfName kDeepSeekMoeNames[] = {
    {"pre_mlp_layernorm.weight", "post_attention_layernorm.weight"},
    {"mlp.router.weight", "mlp.gate.weight"},
    {"mlp.router.expert_bias", "mlp.gate.e_score_correction_bias"},
    kGateUpExperts,
    kDownExperts,
    {"mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.{gate,up}_proj.weight"},
    {"mlp.shared_experts.linear_fc2.weight", "mlp.shared_experts.down_proj.weight"},
};
inline constexpr HfName kDeepSeekPredictionNames[] = {
    {"enorm.weight", "enorm.weight"},
    {"hnorm.weight", "hnorm.weight"},
    {"eh_proj.weight", "eh_proj.weight"},
    {"final_layernorm.weight", "shared_head.norm.weight"},
};
inline constexpr HfCopy kDeepSeekPredictionCopies[] = {
    {"embed_tokens.weight", "model.embed_tokens.weight"},
    {"shared_head.head.weight", "lm_head.weight"},
};

// The families, one file each: in dense/, experts/, hybrid/ and latent/.
extern const std::span<const Family>
    kLlamaFamilies;  // llama, mistral, ministral3, mistral3, qwen2, qwen2_5_vl, qwen3, qwen3_vl,
                     // seed_oss
extern const std::span<const Family> kErnieFamilies;  // ernie4_5, ernie4_5_moe
// gemma2, gemma3_text, gemma3, gemma4_text, gemma4, gemma4_unified_text, gemma4_unified
extern const std::span<const Family> kGemmaFamilies;
extern const std::span<const Family> kGlm4Families;     // glm4
extern const std::span<const Family> kGraniteFamilies;  // granite
extern const std::span<const Family> kPhiFamilies;      // phi3
extern const std::span<const Family> kSmolFamilies;     // smollm3
extern const std::span<const Family> kOlmoFamilies;     // olmo2, olmo3
extern const std::span<const Family> kMixtralFamilies;  // mixtral
extern const std::span<const Family> kQwenMoeFamilies;  // qwen2_moe, qwen3_moe, qwen3_vl_moe
extern const std::span<const Family> kOlmoeFamilies;    // olmoe
extern const std::span<const Family> kMiniMaxFamilies;  // minimax_m2
extern const std::span<const Family> kBailingFamilies;  // bailing_moe_v2
// deepseek_v2, deepseek_v3 (Moonlight), kimi_k2, kimi_k25, glm4_moe_lite, deepseek_v32,
// glm_moe_dsa, deepseek_v4
extern const std::span<const Family> kDeepSeekFamilies;
extern const std::span<const Family> kGlmFamilies;       // glm4_moe
extern const std::span<const Family> kHybridFamilies;    // qwen3_next, qwen3_5 (Qwen3.6)
extern const std::span<const Family> kGptOssFamilies;    // gpt_oss
extern const std::span<const Family> kNemotronFamilies;  // nemotron_h (Nemotron-3)

}  // namespace ferry::converter
