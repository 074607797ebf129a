// The names of a family beside the parameters of one configuration: every tensor of the model in
// Hugging Face terms, every tensor in Megatron's, and which box of the one is which box of the
// other.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "converter/families/families.h"
#include "distckpt/plan/sharded_tensor.h"
#include "distckpt/plan/tensor_map.h"
#include "models/spec/parameters.h"
#include "models/spec/transformer_config.h"

namespace ferry::converter {

using models::Merge;
using models::Split;
using models::Stage;

// Part of a Megatron tensor: `box` of it is `model_box` of a model tensor, whose dimensions are
// `axes` (BoxLink).
struct MappedPart {
  std::uint32_t model = 0;  // index into ModelMap::tensors
  distckpt::Box model_box{};
  distckpt::Box box{};
  distckpt::Dims axes{};
  int copy = 0;  // of the model tensor: a parameter may hold it more than once
};

// A parameter, and the model tensors that make it up.
struct MegatronTensor : models::WholeParameter {
  std::vector<MappedPart> parts{};
  std::vector<distckpt::Box> unused{};  // no part of it: zeros, of a norm ones
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
  std::vector<distckpt::ModelTensor> tensors{};  // in the order of the names
  std::vector<MegatronTensor> megatron{};
  std::vector<MegatronObject> extra_states{};
  std::unordered_map<std::string, std::uint32_t> index{};  // of tensors, by name
  // Tensors whose names or shapes follow from those that the files have (HfName::alternative,
  // either_way), and not from the configuration.
  std::map<std::string, distckpt::Shape> chosen{};
  // Hugging Face tensors that repeat one of `tensors`: a tied head, a prediction layer's embedding.
  std::unordered_map<std::string, std::uint32_t> copies{};
  // An optimizer has state of the vision tower's parameters, too, whose tensors are carried.
  bool trains_tower = false;

  // The key that a writer gives it.
  const std::string& written_key(const MegatronTensor& tensor) const;
  // True if a tensor is none of the model's, and travels beside it: a vision tower's.
  bool is_carried(std::string_view hf_name) const;
  // True of make_vision_map's.
  bool is_tower() const;
  // "decoder.layers.3.mlp.experts.experts.linear_fc1.weight of expert 7", for messages.
  std::string describe(const MegatronTensor& tensor) const;
};

// Rows [from, from + count) of a tensor of that shape.
distckpt::Box rows_of(const distckpt::Shape& shape, std::int64_t from, std::int64_t count);

// The shape of a tensor of that name in the Hugging Face form of a checkpoint, if it has one, which
// decides between spellings; empty: its shape is not known. No function: nobody knows.
using FindTensor = std::function<std::optional<distckpt::Shape>(const std::string&)>;

// Throws Error(kLayout) for a family that is not known.
ModelMap make_model_map(const models::TransformerConfig& config, const FindTensor& find = {});

// The number of elements of the map's tensors, in a time that does not grow with the experts of a
// layer. Throws as make_model_map does.
std::int64_t count_parameters(const models::TransformerConfig& config);

// The map of the model's vision tower alone, whose tensors are carried otherwise. Throws
// Error(kLayout) if none is computed.
ModelMap make_vision_map(const models::TransformerConfig& config);

// True if a tensor of that name belongs to a prediction layer, which a checkpoint may lack though
// its configuration names one.
bool is_prediction_tensor(const models::TransformerConfig& config, std::string_view hf_name);

}  // namespace ferry::converter
