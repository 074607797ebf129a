// The parameters of one model: the table's rows applied to a configuration, under the keys that
// Megatron-Core's checkpoints give them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/base/box.h"
#include "models/spec/parameter_table.h"
#include "models/spec/transformer_config.h"

namespace ferry::models {

// The place of a section in the pipeline: the first stage, its layer's, the last.
enum class Stage : std::uint8_t { kFirst, kLayer, kMtp, kLast };

inline constexpr std::string_view kDecoderLayers = "decoder.layers.";
inline constexpr std::string_view kPredictionLayers = "mtp.layers.";
inline constexpr std::string_view kVisionModel = "vision_model.";
inline constexpr std::string_view kEmbeddingKey = "embedding.word_embeddings.weight";
inline constexpr std::string_view kOutputLayerKey = "output_layer.weight";

// A section of the table at one place of a model.
struct Section {
  Stage stage = Stage::kFirst;
  std::optional<std::int64_t> layer{};  // of the decoder, or of the prediction layers
  std::string prefix{};                 // "decoder.layers.3."
  std::string stacked{};                // "decoder.layers."; empty where nothing is stacked
  std::int64_t stack_size = 0;          // layers that lie in such a stack, and the place in it
  std::int64_t stack_index = 0;
  const ParameterSection* table = nullptr;
};

// The configuration with the sizes of the section's layer; nothing where they are the model's.
std::optional<TransformerConfig> layer_sizes(const Section& section,
                                             const TransformerConfig& config);

// Attention and feed-forward of a decoder layer; the one module of a layer of a hybrid model.
std::vector<Section> layer_sections(const TransformerConfig& config, std::int64_t layer);
// A prediction layer: its norms and projection, the layer that it wraps (the layers, in a hybrid
// model, one section each), its last norm.
std::vector<Section> prediction_sections(const TransformerConfig& config, std::int64_t index);

// A vision tower: its embedding, its blocks, its merger, those of its deepstack. None without one.
std::vector<Section> vision_sections(const TransformerConfig& config);

// A parameter as a Megatron module has it, whole: no parallelism, no padding, one layer, one
// expert.
struct WholeParameter {
  const ParameterRow* row = nullptr;
  // Its name in a checkpoint: "decoder.layers.3.mlp.linear_fc1.weight", and for layers that are
  // stacked "decoder.layers.mlp.linear_fc1.weight". Experts share a key, whose first axis (after
  // that of the layers) counts them.
  std::string key{};
  std::string stacked_key{};    // empty outside of the decoder's layers
  std::int64_t stack_size = 0;  // the first axis below stacked_key, and the place on it
  std::int64_t stack_index = 0;
  std::vector<std::string> also{};       // other spellings of key, then of stacked_key
  std::optional<std::int64_t> layer{};   // of the decoder, or of the prediction layers
  std::optional<std::int64_t> expert{};  // of the whole layer
  distckpt::Shape shape{};
  Merge merge = Merge::kCopy;
  Split split = Split::kNone;
  Stage stage = Stage::kLayer;
  bool vocabulary = false;  // the first dimension is padded
  bool fp32 = false;
  bool less_one = false;
  bool trained_in_fp32 = false;
};

WholeParameter make_parameter(const Section& section,
                              const ParameterRow& row,
                              const TransformerConfig& config,
                              std::optional<std::int64_t> expert);

// A range of experts: [begin, end).
struct ExpertRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// The parameters of a section in the order of our modules, expert after expert.
std::vector<WholeParameter> parameters_of(const Section& section,
                                          const TransformerConfig& config,
                                          ExpertRange experts);

// A key of experts, for one of them: "….experts.experts.linear_fc1.weight" ->
// "….experts.experts.7.linear_fc1.weight".
std::string with_expert(std::string_view key, std::int64_t expert);

// The key of one expert's tensor where each has its own:
// "decoder.layers.3.mlp.experts.experts.7.linear_fc1.weight". Other tensors have one anyway.
std::string single_key(const WholeParameter& parameter);

// Without the "module." that wrappers put before every key.
std::string_view strip_wrappers(std::string_view key);

}  // namespace ferry::models
