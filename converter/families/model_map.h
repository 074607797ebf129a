// The rules of a family applied to one configuration: every tensor of the model in Hugging Face
// terms, every tensor in Megatron's, and which box of the one is which box of the other.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "converter/families/families.h"
#include "distckpt/plan/sharded_tensor.h"
#include "distckpt/plan/tensor_map.h"
#include "models/spec/transformer_config.h"

namespace ferry::converter {

// Part of a Megatron tensor: `box` of it is `model_box` of a model tensor.
struct MappedPart {
  std::uint32_t model = 0;  // index into ModelMap::tensors
  distckpt::Box model_box{};
  distckpt::Box box{};
};

// A tensor as a Megatron module has it, whole: no parallelism, no padding, one layer, one expert.
struct MegatronTensor {
  // Where checkpoints keep it: "decoder.layers.3.mlp.linear_fc1.weight", and for layers that are
  // stacked "decoder.layers.mlp.linear_fc1.weight". Experts share a key, whose first axis (after
  // that of the layers) counts them.
  std::string key{};
  std::string stacked_key{};             // empty outside of the decoder's layers
  std::vector<std::string> also{};       // other spellings of key, then of stacked_key
  std::optional<std::int64_t> layer{};   // of the decoder, or of the prediction layers
  std::optional<std::int64_t> expert{};  // of the whole layer
  distckpt::Shape shape{};
  Merge merge = Merge::kCopy;
  Split split = Split::kNone;
  Stage stage = Stage::kLayer;
  bool vocabulary = false;  // the first dimension is padded
  bool fp32 = false;
  std::vector<MappedPart> parts{};
};

// The place of an `_extra_state`.
struct MegatronObject {
  distckpt::ShardedObject object{};  // as it is written
  Stage stage = Stage::kLayer;
  std::optional<std::int64_t> layer{};
  std::optional<std::int64_t> expert{};
};

struct ModelMap {
  models::TransformerConfig config{};
  const Family* family = nullptr;
  std::vector<distckpt::ModelTensor> tensors{};  // in the order of the rules
  std::vector<MegatronTensor> megatron{};
  std::vector<MegatronObject> extra_states{};
  std::unordered_map<std::string, std::uint32_t> index{};  // of tensors, by name
  // Hugging Face tensors that repeat one of `tensors`: a tied head, a prediction layer's embedding.
  std::unordered_map<std::string, std::uint32_t> copies{};

  // The key that a writer gives it.
  const std::string& written_key(const MegatronTensor& tensor) const;
  // "decoder.layers.3.mlp.experts.experts.linear_fc1.weight of expert 7", for messages.
  std::string describe(const MegatronTensor& tensor) const;
};

// Throws Error(kLayout) for a family that is not known.
ModelMap make_model_map(const models::TransformerConfig& config);

// Whether a tensor of that name belongs to a prediction layer, which a checkpoint may lack though
// its configuration names one.
bool is_prediction_tensor(const models::TransformerConfig& config, std::string_view hf_name);

}  // namespace ferry::converter
