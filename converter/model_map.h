// The rules of a family applied to one configuration: every tensor of the model in Hugging Face
// terms, every tensor in Megatron's, and which box of the one is which box of the other.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "converter/families.h"
#include "distckpt/layout.h"
#include "distckpt/parallel_config.h"
#include "distckpt/sharded_tensor.h"
#include "distckpt/tensor_map.h"
#include "distckpt/torch_dist_writer.h"
#include "distckpt/transformer_config.h"

namespace ferry::converter {

// Part of a Megatron tensor: `box` of it is `model_box` of a model tensor.
struct MappedPart {
  std::uint32_t model = 0;  // index into ModelMap::tensors
  distckpt::Box model_box{};
  distckpt::Box box{};
};

// A tensor as a Megatron module has it, whole: no parallelism, no padding, one layer.
struct MegatronTensor {
  std::string name{};                   // below the layer prefix for layers, else whole
  std::optional<std::int64_t> layer{};  // of the whole model
  distckpt::Shape shape{};
  Merge merge = Merge::kCopy;
  Split split = Split::kNone;
  Stage stage = Stage::kLayer;
  bool vocabulary = false;  // the first dimension is padded
  std::vector<MappedPart> parts{};
};

struct ModelMap {
  distckpt::TransformerConfig config{};
  const Family* family = nullptr;
  std::vector<distckpt::ModelTensor> tensors{};  // in the order of the rules
  std::vector<MegatronTensor> megatron{};
  std::unordered_map<std::string, std::uint32_t> index{};  // of tensors, by name

  // "decoder.layers.3.mlp.linear_fc1.weight", for messages.
  std::string full_name(const MegatronTensor& tensor) const;
};

// Throws Error(kLayout) for a family that is not known.
ModelMap make_model_map(const distckpt::TransformerConfig& config);

// The links between the model's tensors and those of a Megatron checkpoint, whatever its keys:
// stacked over layers, one per layer, gate and up apart, prefixed with "module.". Throws
// Error(kLayout) naming the tensor that is missing, surplus or of another shape. Tied embeddings
// that are stored twice become a second copy.
distckpt::TensorMap link_megatron(const ModelMap& map, const distckpt::Layout& layout);

// What each rank of a mesh would save, in the order of ranks (tensor parallel rank fastest, then
// pipeline): the tensors that GPTModel::sharded_state_dict() gives there, under keys stacked over
// layers. `dtypes` are those of map.megatron. Throws Error(kUsage) if the model cannot be split so.
std::vector<distckpt::RankState> sharded_state(const ModelMap& map,
                                               const std::vector<distckpt::DType>& dtypes,
                                               const distckpt::ParallelConfig& parallel);

// Checks the objects of a checkpoint: extra states of modules that the family has, complete. Throws
// Error(kCorrupt).
void check_object_keys(const ModelMap& map, const std::vector<std::string>& keys);

// State of a training run that is not the model: optimizer, RNG. Its keys are told apart from
// tensors that are not mapped.
bool is_training_state(std::string_view key);

// Without the "module." that wrappers put before every key.
std::string_view strip_wrappers(std::string_view key);

}  // namespace ferry::converter
