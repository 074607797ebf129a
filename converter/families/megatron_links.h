// Links the stored tensors of a Megatron checkpoint to the tensors of the model, in any form of the
// keys: stacked over layers or one per layer, experts stacked or apart, gate and up apart, wrapped.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "converter/families/model_map.h"
#include "distckpt/plan/layout.h"
#include "distckpt/plan/tensor_map.h"

namespace ferry::converter {

// The side of a plan. Elements that Megatron has a second time and does not compute
// with (values that are keys) are written; those of a source are left out, since training changes
// the first ones alone.
enum class LinkedSide : std::uint8_t { kSource, kTarget };

// Throws Error(kLayout) naming the tensor that is missing, surplus or of another shape. Tied
// embeddings that are stored twice become a second copy. Stored tensors count whose keys begin
// with `prefix`; without one, those that are no training state.
distckpt::TensorMap link_megatron(const ModelMap& map,
                                  const distckpt::Layout& layout,
                                  LinkedSide side = LinkedSide::kTarget,
                                  std::string_view prefix = {});

// Checks the objects of a checkpoint: extra states of modules that the family has, complete. Throws
// Error(kCorrupt).
void check_object_keys(const ModelMap& map, const std::vector<std::string>& keys);

inline constexpr std::string_view kTrainerPrefix = "trainer.";  // of a trainer's own objects

// State of a training run that is not the model: optimizer, RNG, a trainer's own. Its keys are told
// apart from tensors that are not mapped.
bool is_training_state(std::string_view key);

}  // namespace ferry::converter
